"""Convert checkpoints between Megatron-LM, BigScience, Meta's Llama, Hugging Face and our format."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatron.checkpointing.conversion.network import manifest_of_import, parameters_of
from megatron.checkpointing.hugging_face.import_model import ImportOptions, import_model
from megatron.checkpointing.manifest import Manifest, parse_fields, read_manifest
from megatron.checkpointing.megatron_lm import bigscience, llama_meta, megatron, torch_dist
from megatron.checkpointing.megatron_lm.detect import system_of, title_of
from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.megatron_lm.megatron_files import write_megatron
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
)
from megatron.checkpointing.resharding.universal import publish_full, read_checkpoint
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    WrongCheckpointError,
    near,
)
from megatron.common.registry import KINDS, LOADERS, NETWORKS
from megatron.config.architecture.architecture import network_named
from megatron.config.config import Config
from megatron.config.data.corpora import DataConfig
from megatron.config.network.model_spec import ModelSpec
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.zero import DeepSpeedConfig
from megatron.config.parsing.files import Values
from megatron.config.plan.plan import plan
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.logging import LoggingConfig
from megatron.tokenizer.build import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Options of a conversion.

    Args:
        loader: format to read; None to detect it.
        saver: format to write; None for Megatron-LM's if that is read, else ours.
        tensor: tensor-parallel ranks to write Megatron-LM's files for.
        pipeline: pipeline stages to write them for.
        flags: names of the flags for these two, for messages.
        heads: attention heads, if given by the user.
        architecture: that the user expects of the network; None for any.
        task: of its head, where the files do not name it.
        distributed: whether Megatron-LM's files are in the format torch_dist.
    """

    source: Path
    output: Path
    loader: str | None = None
    saver: str | None = None
    tensor: int = 1
    pipeline: int = 1
    flags: tuple[str, str]
    heads: int | None = None
    architecture: str | None = "gpt"
    task: str | None = None
    distributed: bool = False


def find(
    source: Path, loader: str | None, *, heads: int | None = None, task: str | None = None
) -> ForeignCheckpoint:
    """Read a checkpoint of another program.

    Raises:
        WrongCheckpointError: there is none, or its format is not supported.
    """
    match _format_of(source, loader):
        case "megatron":
            return megatron.find(source, heads=heads)
        case "torch_dist":
            return torch_dist.find(source, heads=heads)
        case "bigscience":
            return bigscience.find(source)
        case "llama_meta":
            return llama_meta.find(source)
        case None:
            if not source.exists():
                raise WrongCheckpointError(
                    f"{source}: there is no such file or directory{near(source)}"
                )
            raise WrongCheckpointError(f"{source} holds no checkpoint of a known format")
        case system if system in LOADERS:
            read: Callable[..., ForeignCheckpoint] = LOADERS.get(system)
            return read(source, heads=heads, task=task)
        case system:
            raise WrongCheckpointError(
                f"{source} is {title_of(system)}: reading it is not supported"
            )


def convert(conversion: Conversion, parse: Callable[[Values], Config]) -> Iterator[str]:
    """Run a conversion; yield messages for the user.

    Memory: one parameter, or one rank's weights for Megatron-LM.

    Args:
        parse: returns the Config, given settings from the files that the command line overrides.

    Raises:
        ConfigError: flags are missing or contradict the files.
        CheckpointError: a file is missing, damaged, or of another kind.
    """
    loader = _format_of(conversion.source, conversion.loader)
    loader = "hugging_face" if loader == "llama2_hf" else loader
    saver = conversion.saver or ("megatron" if loader == "megatron" else "own")
    if loader == "hugging_face":
        yield from _from_transformers(conversion, parse({}), saver)
        return
    if loader == "own":
        folder = checkpoint_of(conversion.source)
        manifest = read_manifest(folder)
        _require_architecture(conversion, manifest.spec.architecture)
        checkpoint = read_checkpoint(folder, manifest, optimizer=saver == "own")
    else:
        found = find(conversion.source, loader, heads=conversion.heads, task=conversion.task)
        _require_architecture(conversion, declaration_of(found.objective).network)
        manifest, checkpoint = _to_native(found, parse, keeps_rows=saver == "own")
        yield from found.notices
        if padding := found.rows - manifest.spec.vocabulary.vocab_size:
            yield (
                f"{padding} of the {found.rows} rows of the embedding count as padding, since the "
                f"tokenizer has {found.rows - padding} tokens"
            )
    if saver == "megatron":
        written = write_megatron(
            manifest,
            checkpoint,
            conversion.output,
            tensor=conversion.tensor,
            pipeline=conversion.pipeline,
            flags=conversion.flags,
            for_release=False,
            distributed=conversion.distributed,
        )
        if conversion.distributed:
            yield f"{written} holds the weights of {conversion.source} for any ranks (torch_dist)"
            return
        yield f"{written} holds the weights of {conversion.source} for {conversion.tensor} x {conversion.pipeline} ranks"
        return
    if (conversion.tensor, conversion.pipeline) != (1, 1):
        yield f"{' and '.join(conversion.flags)} are ignored: our own files open in any layout"
    how = "--finetune"
    if manifest.checkpoint.saves_optimizer:
        # Files of other programs do not contain our learning-rate schedule.
        how = "--no-load-rng" if loader == "own" else "--no-load-rng --override-opt_param-scheduler"
    yield from _next_steps(publish_full(conversion.output, manifest, checkpoint), conversion, how)


def _format_of(source: Path, loader: str | None) -> str | None:
    """Return the format of a checkpoint: both formats of Megatron-LM are its loader's."""
    found = system_of(source)
    return found if loader is None or (loader, found) == ("megatron", "torch_dist") else loader


def _require_architecture(conversion: Conversion, found: str) -> None:
    """Refuse a network of another architecture than --model-type, unless it is one in its place.

    Raises:
        ConfigError: names both.
    """
    kind = (NETWORKS.get_class(found).in_place_of if found in NETWORKS else "") or found
    if conversion.architecture not in (None, kind):
        raise ConfigError(
            f"--model-type {conversion.architecture.upper()}, but {conversion.source} holds a "
            f"{found.upper()}: give --model-type {kind.upper()}"
        )


def _next_steps(written: Path, conversion: Conversion, how: str = "--finetune") -> Iterator[str]:
    """Yield commands that use a checkpoint that was written.

    Args:
        how: flags for resuming with everything in it.
    """
    yield f"{written} holds {conversion.source}"
    if conversion.architecture is None:
        return
    script = declaration_of(conversion.architecture).script
    yield f"continue training with: {script} --use-checkpoint-args --load {conversion.output} {how} ..."
    if network_named(conversion.architecture).service == "prompts":
        yield f"generate with: tools/generate_samples_gpt.py --load {conversion.output} --prompt TEXT"


def _from_transformers(conversion: Conversion, config: Config, saver: str) -> Iterator[str]:
    """Import a transformers model; see import_model."""
    if saver != "own":
        raise ConfigError(
            f"a model of transformers' goes with --saver own: write --saver own, then convert "
            f"--save-dir {conversion.output} with --saver megatron"
        )
    imported = import_model(
        conversion.source,
        conversion.output,
        ImportOptions(
            tokenizer=config.tokenizer.tokenizer_name_or_path,
            seq_length=config.model.seq_length or None,
        ),
    )
    if imported.absent:
        yield f"not in the files, so with initial weights: {', '.join(imported.absent)}"
    yield from map(str, imported.measured)
    yield from _next_steps(imported.folder, conversion)


def _to_native(
    found: ForeignCheckpoint,
    parse: Callable[[Values], Config],
    *,
    keeps_rows: bool,
) -> tuple[Manifest, FullCheckpoint]:
    """Translate a foreign checkpoint to our manifest and weights."""
    config = parse(found.values)
    vocab_size = _vocab_size(found, config, needed=keeps_rows)
    if vocab_size > found.rows:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, and the embedding in {found.folder} has "
            f"{found.rows} rows: it was trained with another tokenizer"
        )
    manifest = native_manifest(found, config, vocab_size=vocab_size)
    checkpoint = native_weights(found, manifest.spec)
    if keeps_rows:
        return manifest, checkpoint
    # Padding follows from the ranks to write for.
    tokenizer = asdict(config.tokenizer)
    return replace(manifest, config={**manifest.config, "tokenizer": tokenizer}), checkpoint


def _vocab_size(found: ForeignCheckpoint, config: Config, *, needed: bool) -> int:
    """Return the tokenizer's vocabulary size; the number of rows if unknown and not `needed`."""
    reason = ""
    if config.tokenizer.true_vocab_size is not None:
        return config.tokenizer.true_vocab_size
    if config.tokenizer.tokenizer_type or config.tokenizer.vocab_file:
        arguments = objective_tokenizer_arguments(config.tokenizer, found.objective)
        try:
            return build_tokenizer(**arguments).vocab_size
        except (ConfigError, DataError) as error:
            # The tokenizer files named in a checkpoint may not exist on this machine.
            reason = f"; {error}"
    if found.vocab_size is None and needed:
        raise ConfigError(
            f"{found.folder} does not contain the vocabulary size of its tokenizer (the embedding has "
            f"{found.rows} rows): give --true-vocab-size, or the flags of the tokenizer{reason}"
        )
    return found.vocab_size or found.rows


def native_manifest(found: ForeignCheckpoint, config: Config, *, vocab_size: int) -> Manifest:
    """Build our manifest, without files, for a foreign checkpoint.

    Raises:
        ConfigError: the network is not supported.
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
    config = replace(
        config,
        tokenizer=tokenizer,
        # These describe that run and its machine; the result is for any layout.
        checkpoint=CheckpointConfig(),
        parallel=ParallelConfig(),
        deepspeed=DeepSpeedConfig(),
        logging=LoggingConfig(),
        # Of a network for a downstream task there are no token files.
        data=config.data if KINDS.about(declaration_of(found.objective).kind) else DataConfig(),
    )
    # "cuda" allows 16-bit dtypes; nothing is trained here.
    run_plan = plan(
        config, world_size=1, vocab_size=vocab_size, device="cuda", objective=found.objective
    )
    held = replace(run_plan.checkpoint, saves_optimizer=found.has_optimizer, saves_streams=False)
    # In those programs padding takes part in the softmax, and so it does in a run that resumes theirs.
    vocabulary = run_plan.model.vocabulary.with_softmax(counts_padding=True)
    model = replace(run_plan.model, vocabulary=vocabulary)
    run_plan = replace(run_plan, checkpoint=held, model=model)
    _require_names(
        set(found.checkpoint.parameters), set(parameters_of(run_plan.model)), found.folder
    )
    state = parse_fields(TrainState, found.state)
    return manifest_of_import(found.folder, config, run_plan, state)


def native_weights(found: ForeignCheckpoint, spec: ModelSpec) -> FullCheckpoint:
    """Return the parameters of `found`; shapes are compared with the network on access."""
    shapes = {name: tuple(p.shape) for name, p in parameters_of(spec).items()}

    def read(name: str) -> ParameterState:
        parameter, wanted = found.checkpoint.parameters[name], shapes[name]
        if parameter.weight.shape != wanted:
            raise CheckpointError(
                f"{found.folder}: {name} is {list(parameter.weight.shape)}, and the network of its "
                f"arguments has {list(wanted)}; give the flags of the network"
            )
        return parameter

    return replace(
        found.checkpoint, parameters=LazyParameters({name: partial(read, name) for name in shapes})
    )


def _require_names(found: set[str], expected: set[str], folder: Path) -> None:
    """Refuse a checkpoint with other parameter names than the network of its arguments.

    Raises:
        CheckpointError: lists them.
    """
    if found != expected:
        raise CheckpointError(
            f"{folder} holds other parameters than the network of its arguments: missing "
            f"{sorted(expected - found)}, unexpected {sorted(found - expected)}"
        )
