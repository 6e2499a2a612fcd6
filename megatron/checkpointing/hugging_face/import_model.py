"""Import a Hugging Face transformers model as a checkpoint: compare logits, then convert."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpointing.conversion.model_folder import Reader
from megatron.checkpointing.conversion.network import (
    initial_weight,
    manifest_of_import,
    parameters_of,
)
from megatron.checkpointing.hugging_face.families.family import Family, Part
from megatron.checkpointing.hugging_face.families.registry import (
    family_of_config,
    require_same_network,
)
from megatron.checkpointing.hugging_face.logit_check import (
    LogitDifference,
    compare,
    require_equal,
    sample_tokens,
)
from megatron.checkpointing.hugging_face.quantized import READERS, quantization_of
from megatron.checkpointing.manifest import Manifest, published_tags
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    wrap_full_tensor,
)
from megatron.checkpointing.resharding.universal import publish_full
from megatron.common.errors import CheckpointError, DataError, WrongCheckpointError, near
from megatron.common.registry import KINDS
from megatron.config.config import Config, words_of
from megatron.config.data.objective import ObjectiveName
from megatron.config.network.model_spec import ModelSpec
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.parsing.files import Values
from megatron.config.plan.plan import Plan, plan
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    "embeddings.position_ids",
)
"""Suffixes of constants in older files."""
_LANGUAGE_MODEL, _IMAGE_READER = "language_model.", ("vision_tower.", "multi_modal_projector.")
"""Prefixes of tensors in a multimodal model."""
_INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_MOST_TOKENS = 4096  # default of --seq-length, at most

_NO_TRAINING = {
    **{"micro_batch_size": 1, "train_iters": 1, "lr": 0.0001},
    **{"save_interval": 1, "no_save_optim": True, "no_save_rng": True},
}
"""Required settings that do not matter without training."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of the import from Hugging Face.

    Args:
        tokenizer: directory or name on the hub; None for the model's folder.
        trusts_code: whether the tokenizer's Python code may run.
        dtype: of the training to come; None for the dtype in config.json.
        seq_length: of the training to come; None for the model's maximum, at most 4096.
        predicts: whether to import layers of multi-token prediction, if the files have them.
        verifies: whether to run both models and compare their logits.
    """

    tokenizer: str | None = None
    trusts_code: bool = False
    dtype: str | None = None
    seq_length: int | None = None
    predicts: bool = False
    verifies: bool = True


@dataclass(frozen=True)
class ImportResult:
    """Result of an import.

    Args:
        flags: of `script`, for this network and tokenizer.
        is_text_part: whether only the language model of a multimodal one was imported.
        absent: modules that the files do not hold, which have initial weights.
        left_out: a notice of layers of multi-token prediction that only the files have; "" for none.
    """

    folder: Path
    flags: Sequence[str]
    measured: Sequence[LogitDifference]
    script: str
    is_text_part: bool = False
    absent: Sequence[str] = ()
    left_out: str = ""


def import_model(source: Path, directory: Path, options: ImportOptions) -> ImportResult:
    """Import the model in `source` as the checkpoint of iteration 0 of `directory`.

    Memory: one fp32 model while comparing; a parameter and its copy while writing.

    Raises:
        CheckpointError: the architecture or an option of it is not supported, the logits differ,
            or `directory` holds checkpoints; nothing is written.
        DataError: the tokenizer is missing, or has more ids than the embedding has rows.
    """
    if published_tags(directory):
        raise WrongCheckpointError(f"--save {directory} holds checkpoints already: give another")
    description = describe_model(source, options, save=directory)
    spec = description.plan.model
    with open_weights(source, description) as checkpoint:
        measured = []
        if options.verifies:
            tokens_bs = sample_tokens(spec, description.tokenizer)
            # fp32 represents the weights exactly, whatever the dtype of the files.
            auto_class = description.family.auto_class
            measured = compare(spec, checkpoint, source, tokens_bs, "fp32", auto_class=auto_class)
            require_equal(measured)
        folder = publish_full(directory, description.manifest, checkpoint)
    return ImportResult(
        folder,
        description.flags,
        measured,
        description.script,
        description.is_text_part,
        _absent(description),
        _left_out(source, description),
    )


def _absent(description: "ModelDescription") -> list[str]:
    """Return the modules of a network that its files do not hold."""
    spec = description.plan.model
    names = ParameterNames.of(spec)
    modules = {names.module(name).rpartition(".")[0] for name in parameters_of(spec)}
    return sorted(modules.intersection(description.family.absent))


def _left_out(source: Path, description: "ModelDescription") -> str:
    """Return a notice if the files have layers of multi-token prediction, and the network has none."""
    spec, family = description.plan.model, description.family
    with Reader(source) as reader:
        if spec.prediction or not any(map(family.left_out(spec), reader.names)):
            return ""
    remedy = "--with-mtp imports them"
    if not family.prediction:
        remedy = f"they are not built for a {family.model_type}"
    return f"layers of multi-token prediction were left out: {remedy}"


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A transformers model as a plan and a manifest, without weights.

    Args:
        flags: of `script`, for this network and tokenizer.
        script: which trains it.
        manifest: without files.
        is_text_part: whether this is the language model of a multimodal one.
        quantization: how its weights are quantized; "" for not.
    """

    family: Family
    flags: Sequence[str]
    script: str
    plan: Plan
    tokenizer: Tokenizer
    manifest: Manifest
    is_text_part: bool
    quantization: str


def describe_model(source: Path, options: ImportOptions, *, save: Path) -> ModelDescription:
    """Translate config.json of the model in `source` to settings, plan and manifest.

    Args:
        save: --save of the run to come.

    Raises:
        CheckpointError: the architecture or an option of it is not supported.
        DataError: the tokenizer is missing, or has more ids than the embedding has rows.
    """
    full_config = _read_config(source)
    config = language = _language_model(full_config)
    family, quantization = family_of_config(config), quantization_of(full_config)
    if not options.predicts:
        config = family.without_predictions(config)
    rows = int(config["vocab_size"])
    length = options.seq_length or min(_positions(config), _MOST_TOKENS)
    values = {**family.values(config), **_shared_values(source, config, rows, options, length)}
    values |= family.values_for(length)
    declared = declaration_of(family.objective)
    data = {"data_path" if KINDS.about(declared.kind) else "train_data": ["none"]}
    run_config = Config.of(**{**values, **_NO_TRAINING, **data, "save": save})
    tokenizer = build_tokenizer(
        **objective_tokenizer_arguments(run_config.tokenizer, family.objective)
    )
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids and the model rows "
            f"for {rows}: give --tokenizer-name-or-path the one that it was trained with"
        )
    run_plan = _plan(run_config, tokenizer.vocab_size, family.objective)
    require_same_network(family, config, run_plan.model)
    return ModelDescription(
        family=family,
        flags=[part for word in words_of(values) for part in _apart(word)],
        script=family.script_of(config) or declared.script,
        plan=run_plan,
        tokenizer=tokenizer,
        manifest=manifest_of_import(source, run_config, run_plan),
        is_text_part=language is not full_config,
        quantization=quantization,
    )


@contextmanager
def open_weights(source: Path, description: ModelDescription) -> Iterator[FullCheckpoint]:
    """Open the weights in `source`; each is read on access.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    with READERS[description.quantization](source) as reader:
        yield _read_weights(reader, description.family, description.plan.model)


def _read_config(source: Path) -> dict[str, Any]:
    """Read config.json with transformers' default values."""
    if not source.exists():
        raise WrongCheckpointError(f"--load {source} does not exist{near(source)}")
    if not (source / "config.json").is_file():
        raise WrongCheckpointError(f"--load {source} has no config.json: not a transformers model")
    # Imported here: it takes seconds.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(source), local_files_only=True, trust_remote_code=False
        ).to_dict()
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise WrongCheckpointError(
                f"{source / 'config.json'} describes an architecture with its own Python code, "
                "which is never run: only architectures of transformers are imported"
            ) from error
        raise CheckpointError(f"{source / 'config.json'} is not understood: {error}") from error


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text config of a multimodal model; other configs unchanged."""
    if config.get("model_type") != "gemma3":
        return config
    outer = {name: config.get(name) for name in ("dtype", "tie_word_embeddings")}
    return {**config["text_config"], **outer}


def _shared_values(
    source: Path, config: Mapping[str, Any], rows: int, options: ImportOptions, length: int
) -> Values:
    """Return the settings common to all architectures."""
    dtype_name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    of_file = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype_name.removeprefix("torch."), "fp32")
    dtype = options.dtype or of_file
    values = {
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "seq_length": length,
        # All rows are weights, even if the tokenizer has fewer tokens; tensor parallelism pads.
        **{"make_vocab_size_divisible_by": 1, "true_vocab_size": rows},
        **({} if dtype == "fp32" else {dtype: True}),
    }
    if not options.tokenizer and not any((source / name).is_file() for name in _TOKENIZER_FILES):
        # Token ids instead of text; the last one is EOD.
        return {**values, "tokenizer_type": "NullTokenizer", "vocab_size": rows - 1}
    return {
        **values,
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": options.tokenizer or source.resolve(),
        "tokenizer_kwargs": ["trust_remote_code", "true"] if options.trusts_code else None,
    }


def _apart(word: str) -> list[str]:
    """Return a flag and its value as two words."""
    return word.split("=", 1) if word.startswith("--") else [word]


def _positions(config: Mapping[str, Any]) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        if config.get(name):
            return int(config[name])
    return 2048


def _plan(run_config: Config, vocab_size: int, objective: ObjectiveName) -> Plan:
    # fp16 is refused on CPUs, but the run to come may have GPUs.
    device = "cuda" if run_config.precision.fp16 else "cpu"
    return plan(run_config, world_size=1, vocab_size=vocab_size, device=device, objective=objective)


def _names_in_files(reader: Reader, family: Family, spec: ModelSpec) -> dict[str, str]:
    """Map the architecture's tensor names to those in the files, without constants."""
    left_out = family.left_out(spec)
    heads = ("lm_head.", "embed_out.", "cls.", "classifier.", "qa_outputs.", "score.")
    names = {
        name.removeprefix(_LANGUAGE_MODEL): name
        for name in reader.names
        if not name.endswith((*_BUFFERS, _INVERSE_FREQUENCIES))
        and not name.startswith(_IMAGE_READER)
        and not left_out(name)
    }
    return {
        name if name.startswith((family.prefix, *heads)) else f"{family.prefix}{name}": in_files
        for name, in_files in names.items()
    }


def _read_weights(reader: Reader, family: Family, spec: ModelSpec) -> FullCheckpoint:
    """Check names and shapes of all tensors and return the weights, each read on access.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    named, parts = _names_in_files(reader, family, spec), [*family.parts(spec)]
    wanted = {name for part in parts for name in part.theirs}
    # Older files contain tied weights twice.
    copies = ["lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight"]
    copies = copies if spec.vocabulary.tied_embeddings else []
    for name in ["cls.predictions.decoder.bias", *copies]:
        named.pop(name, None)
    if wanted != set(named):
        missing, other = sorted(wanted - set(named)), sorted(set(named) - wanted)
        raise CheckpointError(
            f"the files do not hold a {family.architecture}: missing {missing[:5]}, "
            f"unexpected {other[:5]}"
        )
    parameters = parameters_of(spec)
    for part in parts:
        shapes = [
            tuple(tensor.shape) for tensor in part.mapping.to_hugging_face(parameters[part.ours])
        ]
        for name, shape in zip(part.theirs, shapes, strict=True):
            if (found := reader.shape(named[name])) != shape:
                raise CheckpointError(f"{name} is {list(found)} instead of {list(shape)}")

    def load(part: Part) -> ParameterState:
        tensors = [reader.tensor(named[name]) for name in part.theirs]
        return ParameterState(
            weight=wrap_full_tensor(part.mapping.from_hugging_face(tensors).float())
        )

    def initial(name: str) -> ParameterState:
        return ParameterState(
            weight=wrap_full_tensor(
                initial_weight(name, tuple(parameters[name].shape), spec.init_std)
            )
        )

    loaders = {part.ours: partial(load, part) for part in parts}
    absent = {name: partial(initial, name) for name in parameters if name not in loaders}
    return FullCheckpoint(
        parameters=LazyParameters({name: {**loaders, **absent}[name] for name in parameters}),
        counters=dict.fromkeys(_COUNTERS, 0),
    )
