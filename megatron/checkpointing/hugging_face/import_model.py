"""A folder of transformers' as a checkpoint to begin a run from: compared, then streamed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from megatron.checkpointing.hugging_face.model_folder import Reader
from megatron.checkpointing.hugging_face.network import manifest_of_import, parameters_of
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.names import published_tags
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    unsharded,
)
from megatron.checkpointing.resharding.universal import publish_full
from megatron.common.errors import CheckpointError, DataError, WrongCheckpointError, near
from megatron.config.config import Config, parse_config
from megatron.config.data.tokenizer import gpt_tokenizer_arguments
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan import Plan, plan
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of the names of constants that older files hold beside the weights."""
_LANGUAGE_MODEL, _IMAGE_READER = "language_model.", ("vision_tower.", "multi_modal_projector.")
"""Prefixes of the tensors of a model that reads images too."""
_INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_MOST_TOKENS = 4096  # of a sample, unless it is said

_NO_TRAINING = [
    *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "0.0001"),
    *("--data-path", "none", "--save-interval", "1", "--no-save-optim", "--no-save-rng"),
]
"""What the plan of a checkpoint needs and no training was asked for."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """How to import.

    Args:
        tokenizer: a directory or a name on the hub; None for the folder itself.
        trusts_code: whether Python code that comes with the tokenizer may be run.
        dtype: number format of the run to come; None for that of config.json.
        seq_length: tokens of a sample of that run; None for what the model was made for.
        verifies: whether both models are run and compared.
    """

    tokenizer: str | None = None
    trusts_code: bool = False
    dtype: str | None = None
    seq_length: int | None = None
    verifies: bool = True


@dataclass(frozen=True)
class ImportResult:
    """What was written, the words of pretrain_gpt.py that go with it, and how equal it is.

    Args:
        is_text_part: whether the model reads images too, and its language model alone was written.
    """

    folder: Path
    flags: Sequence[str]
    measured: Sequence[LogitDifference]
    is_text_part: bool = False


def import_model(source: Path, directory: Path, wishes: ImportOptions) -> ImportResult:
    """Write the model in `source` as the checkpoint of iteration 0 of `directory`.

    Memory: while comparing, one model in 32 bits; while writing, a parameter and its copy.

    Raises:
        CheckpointError: `source` is no model of a known architecture, no flags say its network, the
            models differ, or `directory` holds checkpoints; nothing is written then.
        DataError: the tokenizer is missing, or has ids without a row.
    """
    if published_tags(directory):
        raise WrongCheckpointError(f"--save {directory} holds checkpoints already: give another")
    described = describe_model(source, wishes, save=directory)
    spec = described.plan.model
    with open_weights(source, described) as whole:
        measured = []
        if wishes.verifies:
            tokens_bs = sample_tokens(spec, described.tokenizer)
            # In 32 bits both have the weights as they are, whatever the number format of the files.
            measured = compare(spec, whole, source, tokens_bs, "fp32")
            require_equal(measured)
        folder = publish_full(directory, described.manifest, whole)
    return ImportResult(folder, described.flags, measured, described.is_text_part)


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What the model in a folder of transformers' is here, its weights left out.

    Args:
        flags: the words of pretrain_gpt.py that say it.
        manifest: that of a checkpoint of it, without files.
        is_text_part: whether it is the language model of one that reads images too.
    """

    family: Family
    flags: Sequence[str]
    plan: Plan
    tokenizer: Tokenizer
    manifest: Manifest
    is_text_part: bool


def describe_model(source: Path, wishes: ImportOptions, *, save: Path) -> ModelDescription:
    """Return what the model in `source` is here.

    Args:
        save: where the run to come saves.

    Raises:
        CheckpointError: `source` is no model of a known architecture, or no flags say its network.
        DataError: the tokenizer is missing, or has ids without a row.
    """
    whole = _read_config(source)
    config = _language_model(whole)
    family = family_of_config(config)
    rows = int(config["vocab_size"])
    flags = [*family.flags(config), *_shared_flags(source, config, rows, wishes)]
    wished, _ = parse_config([*flags, *_NO_TRAINING, "--save", str(save)])
    tokenizer = build_tokenizer(**gpt_tokenizer_arguments(wished.tokenizer))
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids and the model rows "
            f"for {rows}: give --tokenizer-name-or-path the one that it was trained with"
        )
    decided = _decide(wished, tokenizer.vocab_size)
    require_same_network(family, config, decided.model)
    return ModelDescription(
        family=family,
        flags=flags,
        plan=decided,
        tokenizer=tokenizer,
        manifest=manifest_of_import(wished, decided),
        is_text_part=config is not whole,
    )


@contextmanager
def open_weights(source: Path, described: ModelDescription) -> Iterator[FullCheckpoint]:
    """Give the weights in `source`, each of which is read when it is looked at.

    Raises:
        CheckpointError: tensors are missing, superfluous or of another shape.
    """
    with Reader(source) as reader:
        yield _read_weights(reader, described.family, described.plan.model)


def _read_config(source: Path) -> dict[str, Any]:
    """Return config.json with the values that it leaves out."""
    if not source.exists():
        raise WrongCheckpointError(f"--load {source} does not exist{near(source)}")
    if not (source / "config.json").is_file():
        raise WrongCheckpointError(
            f"--load {source} holds no config.json, so no model of transformers'"
        )
    # Imported here: it takes seconds.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(source), local_files_only=True, trust_remote_code=False
        ).to_dict()
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise WrongCheckpointError(
                f"{source / 'config.json'} describes an architecture by Python code of its own, "
                "which is never run: only architectures of transformers are imported"
            ) from error
        raise CheckpointError(f"{source / 'config.json'} is not understood: {error}") from error


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model in one that reads images too; others as they are."""
    if config.get("model_type") != "gemma3":
        return config
    outer = {name: config.get(name) for name in ("dtype", "tie_word_embeddings")}
    return {**config["text_config"], **outer}


def _shared_flags(
    source: Path, config: Mapping[str, Any], rows: int, wishes: ImportOptions
) -> Iterator[str]:
    """Yield the flags that all architectures need."""
    if not config["tie_word_embeddings"]:
        yield "--untie-embeddings-and-output-weights"
    yield from ("--seq-length", str(wishes.seq_length or min(_positions(config), _MOST_TOKENS)))
    # All rows are weights, also where the tokenizer has fewer tokens; tensor-parallel ranks pad.
    yield from ("--make-vocab-size-divisible-by", "1", "--true-vocab-size", str(rows))
    said = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    of_file = {"bfloat16": "bf16", "float16": "fp16"}.get(said.removeprefix("torch."), "fp32")
    if (dtype := wishes.dtype or of_file) != "fp32":
        yield f"--{dtype}"
    if wishes.tokenizer or any((source / name).is_file() for name in _TOKENIZER_FILES):
        yield from ("--tokenizer-type", "PretrainedFromHF")
        yield from ("--tokenizer-name-or-path", wishes.tokenizer or str(source.resolve()))
        if wishes.trusts_code:
            yield from ("--tokenizer-kwargs", "trust_remote_code", "true")
    else:
        # Numbers in place of texts, of which the last ends documents.
        yield from ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(rows - 1))


def _positions(config: Mapping[str, Any]) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        if config.get(name):
            return int(config[name])
    return 2048


def _decide(wished: Config, vocab_size: int) -> Plan:
    # fp16 is not for CPUs, and the run to come may have GPUs.
    device = "cuda" if wished.precision.fp16 else "cpu"
    return plan(wished, world_size=1, vocab_size=vocab_size, device=device)


def _named(reader: Reader, family: Family) -> dict[str, str]:
    """Return {name that the architecture has: name in the files}, constants left out."""
    heads = ("lm_head.", "embed_out.")
    names = {
        name.removeprefix(_LANGUAGE_MODEL): name
        for name in reader.names
        if not name.endswith((*_BUFFERS, _INVERSE_FREQUENCIES))
        and not name.startswith(_IMAGE_READER)
    }
    return {
        name if name.startswith((family.prefix, *heads)) else f"{family.prefix}{name}": in_files
        for name, in_files in names.items()
    }


def _read_weights(reader: Reader, family: Family, spec: ModelSpec) -> FullCheckpoint:
    """Return the weights, each of which is read when it is looked at.

    Raises:
        CheckpointError: tensors are missing, superfluous or of another shape.
    """
    named, parts = _named(reader, family), [*family.parts(spec)]
    wanted = {name for part in parts for name in part.theirs}
    if spec.tied_embeddings:
        # Older files hold what is tied twice.
        named.pop("lm_head.weight", None)
        named.pop("embed_out.weight", None)
    if wanted != set(named):
        missing, other = sorted(wanted - set(named)), sorted(set(named) - wanted)
        raise CheckpointError(
            f"the files are not those of a {family.architecture}: missing {missing[:5]}, "
            f"unexpected {other[:5]}"
        )
    own = parameters_of(spec)
    for part in parts:
        shapes = [tuple(tensor.shape) for tensor in part.mapping.to_hugging_face(own[part.ours])]
        for name, shape in zip(part.theirs, shapes, strict=True):
            if (found := reader.shape(named[name])) != shape:
                raise CheckpointError(f"{name} is {list(found)} instead of {list(shape)}")

    def made(part: Part) -> ParameterState:
        tensors = [reader.tensor(named[name]) for name in part.theirs]
        return ParameterState(weight=unsharded(part.mapping.from_hugging_face(tensors).float()))

    return FullCheckpoint(
        parameters=LazyParameters({part.ours: partial(made, part) for part in parts}),
        counters=dict.fromkeys(_COUNTERS, 0),
    )
