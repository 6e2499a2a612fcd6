"""T5 in Megatron-LM's files."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from megatron.checkpointing.megatron_lm.networks import Form, Renamed, first_decoder_stage
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.extensions.t5.flags import DecoderSpec

_CROSS_ATTENTION = re.compile(r"\.(inter|cross)_attention\.(query|key_value|dense|linear_)")


class T5Form(Form):
    """T5's two stacks."""

    renamed: ClassVar[Renamed] = ((r"^(encoder|transformer)\.", ""),)
    expresses = names_of(DecoderSpec)

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is cross-attention of a decoder."""
        return any(_CROSS_ATTENTION.search(name) for name in names)

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

    def arguments(self, spec: ModelSpec, pipeline: int) -> dict[str, Any]:
        """Return the arguments of the decoder."""
        own = spec.part(DecoderSpec)
        return {
            "encoder_num_layers": spec.num_layers,
            "decoder_num_layers": own.num_decoder_layers,
            "encoder_seq_length": spec.seq_length,
            "decoder_seq_length": own.decoder_seq_length,
            "pipeline_model_parallel_split_rank": first_decoder_stage(spec, pipeline) or None,
        }
