"""From the checkpoint of one system to that of another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpointing.hugging_face.import_model import ImportOptions, import_model
from megatron.checkpointing.hugging_face.network import manifest_of_import, parameters_of, spec_of
from megatron.checkpointing.manifest import Manifest, read_manifest
from megatron.checkpointing.megatron_lm import bigscience, llama_meta, megatron
from megatron.checkpointing.megatron_lm.detect import SYSTEMS, system_of
from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.megatron_lm.megatron_files import write_megatron
from megatron.checkpointing.names import checkpoint_of
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
)
from megatron.checkpointing.resharding.universal import publish_full, read_checkpoint
from megatron.common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    WrongCheckpointError,
    near,
)
from megatron.config.config import Config
from megatron.config.data.tokenizer import gpt_tokenizer_arguments
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.zero import DeepSpeedConfig
from megatron.config.plan import plan
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.logging import LoggingConfig
from megatron.tokenizer.build import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is read and what is written.

    Args:
        loader: whose files are read; the files say it when this is None.
        saver: whose files are written; None for Megatron-LM's where those are read, else ours.
        tensor: tensor-parallel ranks that Megatron-LM's are written for.
        pipeline: stages that they are written for.
        flags: how a user asks for these two.
        vocab_size: tokens that the tokenizer knows, where the user says it.
        heads: attention heads, where the user says it.
    """

    source: Path
    output: Path
    loader: str | None = None
    saver: str | None = None
    tensor: int = 1
    pipeline: int = 1
    flags: tuple[str, str]
    vocab_size: int | None = None
    heads: int | None = None


def find(source: Path, loader: str | None, *, heads: int | None = None) -> ForeignCheckpoint:
    """Return what a checkpoint of another program holds.

    Raises:
        WrongCheckpointError: there is none that is read.
    """
    match loader or system_of(source):
        case "megatron":
            return megatron.find(source, heads=heads)
        case "bigscience":
            return bigscience.find(source)
        case "llama_meta":
            return llama_meta.find(source)
        case None:
            if not source.exists():
                raise WrongCheckpointError(
                    f"{source}: there is no such file or directory{near(source)}"
                )
            raise WrongCheckpointError(f"{source} holds no checkpoint of a system that is known")
        case system:
            raise WrongCheckpointError(f"{source} is {SYSTEMS[str(system)]}: it is not read")


def convert(wish: Conversion, parse: Callable[[Sequence[str]], Config]) -> Iterator[str]:
    """Do what is wished; yield what should be told of it.

    Memory: one parameter, or one rank's weights of Megatron-LM.

    Args:
        parse: returns all wishes, given words of the command line for what the files say.

    Raises:
        ConfigError: the flags do not say all, or contradict what is found.
        CheckpointError: a file is missing, damaged, or of another kind.
    """
    loader = wish.loader or system_of(wish.source)
    loader = "hugging_face" if loader == "llama2_hf" else loader
    saver = wish.saver or ("megatron" if loader == "megatron" else "own")
    if loader == "hugging_face":
        yield from _from_transformers(wish, parse(()), saver)
        return
    if loader == "own":
        folder = checkpoint_of(wish.source)
        manifest = read_manifest(folder)
        whole = read_checkpoint(folder, manifest, optimizer=saver == "own")
    else:
        found = find(wish.source, loader, heads=wish.heads)
        manifest, whole = _own(found, wish, parse, keeps_rows=saver == "own")
        yield from found.notices
    if saver == "megatron":
        written = write_megatron(
            manifest,
            whole,
            wish.output,
            tensor=wish.tensor,
            pipeline=wish.pipeline,
            flags=wish.flags,
            for_release=False,
        )
        yield f"{written} holds the weights of {wish.source} for {wish.tensor} x {wish.pipeline} ranks"
        return
    if (wish.tensor, wish.pipeline) != (1, 1):
        yield f"{' and '.join(wish.flags)} say nothing of our own files: any layout opens them"
    how = "--finetune"
    if manifest.plan["checkpoint"]["saves_optimizer"]:
        # Files of other programs do not say the path of the learning rate.
        how = "--no-load-rng" if loader == "own" else "--no-load-rng --override-opt_param-scheduler"
    yield from _told(publish_full(wish.output, manifest, whole), wish, how)


def _told(written: Path, wish: Conversion, how: str = "--finetune") -> Iterator[str]:
    """Yield what a user should know of a checkpoint of ours that was written.

    Args:
        how: flags of a run that goes on with all that it holds.
    """
    yield f"{written} holds {wish.source}"
    yield f"train on with: pretrain_gpt.py --use-checkpoint-args --load {wish.output} {how} ..."
    yield f"write with: tools/generate_samples_gpt.py --load {wish.output} --prompt TEXT"


def _from_transformers(wish: Conversion, config: Config, saver: str) -> Iterator[str]:
    """Write a model of transformers' as our own; see import_model."""
    if saver != "own":
        raise ConfigError(
            f"a model of transformers' goes with --saver own: write --saver own, then convert "
            f"--save-dir {wish.output} with --saver megatron"
        )
    said = import_model(
        wish.source,
        wish.output,
        ImportOptions(
            tokenizer=config.tokenizer.tokenizer_name_or_path,
            seq_length=config.model.seq_length or None,
        ),
    )
    yield from map(str, said.measured)
    yield from _told(said.folder, wish)


def _own(
    found: ForeignCheckpoint,
    wish: Conversion,
    parse: Callable[[Sequence[str]], Config],
    *,
    keeps_rows: bool,
) -> tuple[Manifest, FullCheckpoint]:
    """Return what was found as a checkpoint of ours."""
    config = parse(found.flags)
    vocab_size = _vocab_size(found, wish, config, needed=keeps_rows)
    if vocab_size > found.rows:
        raise ConfigError(
            f"the tokenizer knows {vocab_size} tokens, and the table of {found.folder} has "
            f"{found.rows} rows: it was trained with another tokenizer"
        )
    manifest = native_manifest(found, config, vocab_size=vocab_size)
    whole = native_weights(found, manifest.plan["model"])
    if keeps_rows:
        return manifest, whole
    # Rows of padding follow from the ranks that are written for.
    tokenizer = {**manifest.config["tokenizer"]}
    tokenizer["pad_vocab_size_to"] = config.tokenizer.pad_vocab_size_to
    tokenizer["make_vocab_size_divisible_by"] = config.tokenizer.make_vocab_size_divisible_by
    return replace(manifest, config={**manifest.config, "tokenizer": tokenizer}), whole


def _vocab_size(found: ForeignCheckpoint, wish: Conversion, config: Config, *, needed: bool) -> int:
    """Return how many tokens the tokenizer knows: rows of the table where nobody says, or needs it."""
    reason = ""
    if wish.vocab_size is not None:
        return wish.vocab_size
    if config.tokenizer.tokenizer_type or config.tokenizer.vocab_file:
        try:
            return build_tokenizer(**gpt_tokenizer_arguments(config.tokenizer)).vocab_size
        except (ConfigError, DataError) as error:
            # The files named in a checkpoint may lie on the machine that it comes from.
            reason = f"; {error}"
    if found.vocab_size is None and needed:
        raise ConfigError(
            f"{found.folder} does not say how many tokens its tokenizer knows (its table has "
            f"{found.rows} rows): give --true-vocab-size, or the flags of the tokenizer{reason}"
        )
    return found.vocab_size or found.rows


def native_manifest(found: ForeignCheckpoint, config: Config, *, vocab_size: int) -> Manifest:
    """Return the manifest, without files, of what was `found`, with the wishes `config`.

    Raises:
        ConfigError: there is no such network.
        CheckpointError: it has other parameters.
    """
    tokenizer = config.tokenizer
    if tokenizer.pad_vocab_size_to is None:
        divisor = tokenizer.make_vocab_size_divisible_by
        tokenizer = replace(
            tokenizer,
            pad_vocab_size_to=found.rows,
            make_vocab_size_divisible_by=1 if found.rows % divisor else divisor,
        )
    wishes = replace(
        config,
        tokenizer=tokenizer,
        # Of that run on its machine; what is written is for any layout.
        checkpoint=CheckpointConfig(),
        parallel=ParallelConfig(),
        deepspeed=DeepSpeedConfig(),
        logging=LoggingConfig(),
    )
    # "cuda": where weights of 16 bits are trained; nothing is.
    decided = plan(wishes, world_size=1, vocab_size=vocab_size, device="cuda")
    held = replace(decided.checkpoint, saves_optimizer=found.has_optimizer, saves_streams=False)
    # Those programs count padding, and so does a run that continues one of theirs.
    counts = decided.model.padded_vocab_size > decided.model.vocab_size
    model = replace(decided.model, padded_vocab_in_softmax=counts)
    decided = replace(decided, checkpoint=held, model=model)
    _require_names(set(found.whole.parameters), set(parameters_of(decided.model)), found.folder)
    return manifest_of_import(wishes, decided, found.state)


def native_weights(found: ForeignCheckpoint, spec: Mapping[str, Any]) -> FullCheckpoint:
    """Return the parameters of `found`, each compared in shape with the network when it is read.

    Args:
        spec: the network, as in a manifest's plan.
    """
    shapes = {name: tuple(p.shape) for name, p in parameters_of(spec_of(spec)).items()}

    def read(name: str) -> ParameterState:
        parameter, wanted = found.whole.parameters[name], shapes[name]
        if parameter.weight.shape != wanted:
            raise CheckpointError(
                f"{found.folder}: {name} is {list(parameter.weight.shape)}, and the network of its "
                f"arguments has {list(wanted)}; the flags of the network say what it is"
            )
        return parameter

    return replace(
        found.whole, parameters=LazyParameters({name: partial(read, name) for name in shapes})
    )


def _require_names(found: set[str], expected: set[str], folder: Path) -> None:
    """Refuse a checkpoint with other parameters than the network of its arguments has.

    Raises:
        CheckpointError: lists them.
    """
    if found != expected:
        raise CheckpointError(
            f"{folder} holds other parameters than the network of its arguments: missing "
            f"{sorted(expected - found)}, unexpected {sorted(found - expected)}"
        )
