"""The form of each network in Megatron-LM's files: which files hold it, names, flags, arguments."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from megatron.common.registry import NETWORKS, imported
from megatron.config.networks.architecture import network_named
from megatron.extensions.retro.checkpoints import (
    CROSS_ATTENTION,
    EXPRESSED,
    RENAMED,
    retro_arguments,
    retro_flags,
)

Renamed = tuple[tuple[str, str], ...]
"""Patterns of names of parameters, and what each becomes."""


class Form:
    """The form of a network in Megatron-LM's files: that of a GPT, unless a subclass says otherwise."""

    renamed: ClassVar[Renamed] = ((r"^(encoder|transformer|decoder)\.", ""),)
    """From prefixes of parameter names there to those of version 3, in which an only stack has none."""

    expresses: ClassVar[tuple[str, ...]] = ()
    """Fields of ModelSpec that its files express beside those of a GPT."""

    def recognises(self, names: Collection[str]) -> bool:
        """Whether parameters of these names are those of this network and of no other."""
        return False

    def flags(
        self, modules: Mapping[str, Sequence[Tensor]], layers: int, arguments: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield its flags beside those of a GPT.

        Args:
            modules: shards of its parameters, by module name.
            layers: of a decoder behind an encoder.
            arguments: those in the files.
        """
        return iter(())

    def arguments(self, model: Mapping[str, Any], pipeline: int) -> dict[str, Any]:
        """Return its arguments beside those of a GPT.

        Args:
            model: the network as in a manifest's plan.
            pipeline: stages that are written.
        """
        return {}


class GPTForm(Form):
    """GPT, and what no other form recognises."""


class BERTForm(Form):
    """BERT's heads."""

    expresses = ("num_token_types", "binary_head", "head_activation")

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is a masked-LM head, or that of a task."""
        return any(name.startswith(("lm_head.dense.", "classification_head.")) for name in names)

    def flags(
        self, modules: Mapping[str, Sequence[Tensor]], layers: int, arguments: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the flags of the heads."""
        if not any(name.startswith(("binary_head.", "classification_head.")) for name in modules):
            yield "--bert-no-binary-head"
        if arguments.get("openai_gelu"):
            yield "--openai-gelu"

    def arguments(self, model: Mapping[str, Any], pipeline: int) -> dict[str, Any]:
        """Return the arguments of the heads."""
        return {
            "bert_binary_head": model["binary_head"],
            "openai_gelu": model["head_activation"] == "gelu_tanh",
        }


class T5Form(Form):
    """T5's two stacks."""

    renamed: ClassVar[Renamed] = ((r"^(encoder|transformer)\.", ""),)
    expresses = ("num_decoder_layers", "decoder_seq_length")

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is cross-attention of a decoder."""
        is_decoder = (".inter_attention." in n or ".cross_attention." in n for n in names)
        return any(is_decoder) and not RetroForm().recognises(names)

    def flags(
        self, modules: Mapping[str, Sequence[Tensor]], layers: int, arguments: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the flags of the decoder."""
        yield f"--decoder-num-layers={layers}"
        length = arguments.get("decoder_seq_length") or arguments.get("seq_length")
        if length:
            yield f"--decoder-seq-length={length}"
        for name in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            if arguments.get("position_embedding_type") == "relative" and arguments.get(name):
                yield f"--{name.replace('_', '-')}={arguments[name]}"

    def arguments(self, model: Mapping[str, Any], pipeline: int) -> dict[str, Any]:
        """Return the arguments of the decoder."""
        return {
            "encoder_num_layers": model["num_layers"],
            "decoder_num_layers": model["num_decoder_layers"],
            "encoder_seq_length": model["seq_length"],
            "decoder_seq_length": model["decoder_seq_length"],
            "pipeline_model_parallel_split_rank": first_decoder_stage(model, pipeline) or None,
        }


class RetroForm(Form):
    """Retro, in the names of Megatron core."""

    renamed: ClassVar[Renamed] = RENAMED
    expresses = EXPRESSED

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is chunked cross-attention."""
        return any(CROSS_ATTENTION in name for name in names)

    def flags(
        self, modules: Mapping[str, Sequence[Tensor]], layers: int, arguments: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the flags of the encoder of neighbors and of its form."""
        return retro_flags(modules, arguments)

    def arguments(self, model: Mapping[str, Any], pipeline: int) -> dict[str, Any]:
        """Return the arguments of the encoder of neighbors."""
        return retro_arguments(model)


def form_of(network: str) -> Form | None:
    """Return the form of the network of that name; None if these files cannot hold it."""
    found = network_named(network).megatron_in
    return imported(found)() if found else None


def recognised(names: Collection[str]) -> tuple[str, Form]:
    """Return the name and the form of the network that parameters of these names belong to."""
    forms = ((name, form) for name in NETWORKS.with_extensions() if (form := form_of(name)))
    return next(
        ((name, form) for name, form in forms if form.recognises(names)), ("gpt", GPTForm())
    )


def first_decoder_stage(model: Mapping[str, Any], pipeline: int) -> int:
    """Return the stage where T5's decoder begins, the nearest to the middle; 0 if it has no own."""
    decoder_layers = model.get("num_decoder_layers", 0)
    fitting = [
        stage
        for stage in range(1, pipeline)
        if decoder_layers
        and model["num_layers"] % stage == 0
        and decoder_layers % (pipeline - stage) == 0
    ]
    return min(fitting, key=lambda stage: abs(2 * stage - pipeline), default=0)
