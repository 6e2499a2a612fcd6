"""Stages of a pipeline: flags that say which layers each has, and by which schedule they run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting

LAYERS = "layers:"
"""Beginning of a partition method that gives the transformer layers of every stage."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Stages of a pipeline, and its schedule."""

    pipeline_model_parallel_size: int = setting(1, plan="parallel.pipeline")
    """Pipeline-parallel size: number of stages that the layers are divided into."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved pipeline schedule: transformer layers per model chunk; each stage has num-layers
    / stages / this number of chunks (default: one chunk per stage, 1F1B)."""

    num_virtual_stages_per_pipeline_rank: int | None = setting(None, plan="parallel.chunks")
    """Model chunks per pipeline stage; above 1 the schedule is interleaved. Alternative to
    --num-layers-per-virtual-pipeline-stage."""

    enable_zbh1_pipeline: bool = setting(False, plan="parallel.splits_backward")
    """Zero-bubble pipeline schedule (ZB-H1): stages compute weight gradients of linear layers while
    they would be idle, which shrinks the bubble to a third."""

    pp_partition_method: str = setting("type:transformer", plan="parallel.partition_method")
    """How the layers are divided into stages: type:REGEX balances the layers whose class name
    matches, and type:transformer all transformer layers, whatever their class; layers:N,N,... gives
    the transformer layers of each stage, with chunks those of all first chunks, then of all second
    ones; uniform balances the number of layers, parameters their weights."""

    decoder_first_pipeline_num_layers: int | None = setting(None, at_least=1, matters=False)
    """Transformer layers of the first pipeline stage; stages without a number of their own share the
    rest evenly."""

    decoder_last_pipeline_num_layers: int | None = setting(None, at_least=1, matters=False)
    """Transformer layers of the last pipeline stage; see --decoder-first-pipeline-num-layers."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer where layers are divided evenly: the first stage has one
    transformer layer less."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the head as a layer where layers are divided evenly: the last stage has one transformer
    layer less."""

    pipeline_model_parallel_layout: str | None = None
    """Layers of each pipeline stage in letters: E embedding, t transformer layer, m a depth of
    --mtp-num-layers (before the head), L head and loss, | the end of a stage; x*3 and (xy)*3 repeat,
    commas are ignored. With more stages than --pipeline-model-parallel-size each rank has chunks:
    'Ett|(ttt|)*2ttL' has 4 stages, or 2 of 2 chunks."""

    pipeline_model_parallel_split_rank: int | None = setting(None, plan="parallel.split_rank")
    """First pipeline stage of the decoder in an encoder-decoder network: the stages before it divide the
    encoder's layers evenly, it and later stages the decoder's (default: by --pp-partition-method)."""


def chunks_of(pipeline: PipelineConfig, num_layers: int) -> int:
    """Return the number of model chunks of each pipeline stage; 1 where the flags make no sense."""
    stages = max(1, pipeline.pipeline_model_parallel_size)
    if pipeline.pipeline_model_parallel_layout is not None:
        return max(1, len(_parts_of(pipeline.pipeline_model_parallel_layout)) // stages)
    size = pipeline.num_layers_per_virtual_pipeline_stage
    if size is None:
        return max(1, pipeline.num_virtual_stages_per_pipeline_rank or 1)
    return max(1, (num_layers + sum(_counted_ends(pipeline))) // max(1, size * stages))


def partition_method_of(pipeline: PipelineConfig, num_layers: int) -> str:
    """Return how layers are divided into stages, as --pp-partition-method.

    Args:
        num_layers: transformer layers of all stacks.
    """
    layers = _layers_of_parts(pipeline, num_layers)
    return LAYERS + ",".join(map(str, layers)) if layers else pipeline.pp_partition_method


def layers_in(method: str) -> list[int]:
    """Return the transformer layers of each part that a partition method layers:N,N,... gives.

    Raises:
        ValueError: one is not a number.
    """
    return [int(count) for count in method.removeprefix(LAYERS).split(",")]


def pipeline_problems(
    pipeline: PipelineConfig, num_layers: int, *, depths: int = 0
) -> Iterator[str]:
    """Yield why the layers cannot be divided into these stages and chunks.

    Args:
        num_layers: transformer layers of all stacks.
        depths: of multi-token prediction.
    """
    wrong = [
        *range_problems(pipeline, *_END_FIELDS),
        *_chunk_problems(pipeline, num_layers),
        *_layout_problems(pipeline, depths),
        *_method_problems(pipeline.pp_partition_method),
    ]
    flags = _flags_of_layers(pipeline)
    ways = [" ".join(each) for each in flags.values() if each]
    yield from wrong
    if len(ways) > 1:
        yield f"{' and '.join(ways)} divide the layers in different ways: leave one of them"
    elif not wrong and pipeline.pipeline_model_parallel_size > 0:
        yield from _number_problems(pipeline, num_layers, " ".join(ways))


def pipeline_notices(pipeline: PipelineConfig) -> Iterator[str]:
    """Yield a notice for the flags of unequal stages that have no effect with one stage."""
    flags = _flags_of_layers(pipeline)
    if pipeline.pipeline_model_parallel_size == 1 and (given := flags["ends"] + flags["counted"]):
        yield f"{' and '.join(given)}: no effect with --pipeline-model-parallel-size 1"


def flags_of_stages(pipeline: PipelineConfig) -> list[str]:
    """Return the flags that are given to divide the layers into stages and chunks, with their values."""
    size = pipeline.num_layers_per_virtual_pipeline_stage
    chunks = [f"--num-layers-per-virtual-pipeline-stage {size}"] * (size is not None)
    return [*(flag for given in _flags_of_layers(pipeline).values() for flag in given), *chunks]


def _flags_of_layers(pipeline: PipelineConfig) -> dict[str, list[str]]:
    """Return, by the way in which layers are divided, the flags that are given for it."""
    method, layout = pipeline.pp_partition_method, pipeline.pipeline_model_parallel_layout
    ends = _given_ends(pipeline)
    counted = dict(zip(_COUNTED_FLAGS, _counted_ends(pipeline), strict=True))
    usual = PipelineConfig.pp_partition_method
    return {
        "method": [f"--pp-partition-method {method}"] * (method != usual),
        "layout": [f"--pipeline-model-parallel-layout {layout}"] * (layout is not None),
        "ends": [f"{flag} {count}" for flag, count in ends.items() if count is not None],
        "counted": [flag for flag, is_counted in counted.items() if is_counted],
    }


_END_FIELDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _given_ends(pipeline: PipelineConfig) -> dict[str, int | None]:
    """Return the layers of the first and of the last stage, by flag, where they are given."""
    return {
        "--decoder-first-pipeline-num-layers": pipeline.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": pipeline.decoder_last_pipeline_num_layers,
    }


_COUNTED_FLAGS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def _counted_ends(pipeline: PipelineConfig) -> tuple[bool, bool]:
    """Return whether the embedding counts as a layer, and whether the head does."""
    return (
        pipeline.account_for_embedding_in_pipeline_split,
        pipeline.account_for_loss_in_pipeline_split,
    )


def _layers_of_parts(pipeline: PipelineConfig, num_layers: int) -> list[int]:
    """Return the transformer layers of each part where flags of Megatron-LM give them; otherwise [].

    Parts are stages, or chunks: part v * stages + r is chunk v of stage r.
    """
    layout = pipeline.pipeline_model_parallel_layout
    stages, chunks = pipeline.pipeline_model_parallel_size, chunks_of(pipeline, num_layers)
    if layout is not None:
        return [part.count("t") for part in _parts_of(layout)]
    first, last = (count or 0 for count in _given_ends(pipeline).values())
    embedding, head = _counted_ends(pipeline)
    if stages < 2 or not (first or last or embedding or head):
        return []
    if embedding or head:
        layers = even_parts(num_layers + embedding + head, stages * chunks)
        layers[0] -= embedding
        layers[-1] -= head
        return layers
    given = {0: even_parts(first, chunks)} if first else {}
    given |= {stages - 1: even_parts(last, chunks)} if last else {}
    others = (stages - len(given)) * chunks
    rest = iter(even_parts(num_layers - first - last, others) if others else ())
    return [
        given[rank][chunk] if rank in given else next(rest)
        for chunk in range(chunks)
        for rank in range(stages)
    ]


def even_parts(items: int, parts: int) -> list[int]:
    """Return the sizes of parts of equal length; the first ones have what is left over."""
    size, rest = divmod(items, parts)
    return [size + (part < rest) for part in range(parts)]


_COUNT_LAYERS = ("uniform", "parameters", "type:transformer")
"""Partition methods that cannot make more stages than there are transformer layers."""


def _number_problems(pipeline: PipelineConfig, num_layers: int, words: str) -> Iterator[str]:
    """Yield why the layers of each stage do not make the stages of the network.

    A stage between others needs a layer. The first and the last may have the embedding and the head
    alone.

    Args:
        words: the flags that give layers.
    """
    stages, chunks = pipeline.pipeline_model_parallel_size, chunks_of(pipeline, num_layers)
    size, method = pipeline.num_layers_per_virtual_pipeline_stage, pipeline.pp_partition_method
    layers = _layers_of_parts(pipeline, num_layers)
    if method.startswith(LAYERS):
        layers = layers_in(method)
    made = (
        f"{words} makes {len(layers)} stages, of {', '.join(map(str, layers))} transformer layers"
    )
    if not layers:
        if stages > num_layers and method in _COUNT_LAYERS:
            yield (
                f"--pipeline-model-parallel-size {stages} is more than --num-layers {num_layers}: "
                "a stage would have no layer"
            )
    elif split := pipeline.pipeline_model_parallel_split_rank:
        yield (
            f"{words} and --pipeline-model-parallel-split-rank {split} both divide the layers: "
            "leave one out"
        )
    elif size and not any(_counted_ends(pipeline)):
        yield (
            f"{words} with --num-layers-per-virtual-pipeline-stage {size}: chunks differ in size, so "
            f"write their number in its place: --num-virtual-stages-per-pipeline-rank {chunks}"
        )
    elif len(layers) != stages * chunks:
        each = f" of {chunks} chunks" * (chunks > 1)
        yield f"{made}: --pipeline-model-parallel-size is {stages}{each}"
    elif sum(layers) != num_layers:
        yield f"{made}: they have {sum(layers)}, and the network has {num_layers}"
    elif min(layers) < 0:
        yield f"{words} leaves no layers for the other stages: the network has {num_layers}"
    elif 0 in layers[1:-1]:
        yield f"{made}: only the first and the last can be without a layer"


def _chunk_problems(pipeline: PipelineConfig, num_layers: int) -> Iterator[str]:
    """Yield why the layers cannot be divided into model chunks."""
    flags = {
        "--num-layers-per-virtual-pipeline-stage": pipeline.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": pipeline.num_virtual_stages_per_pipeline_rank,
    }
    given = {flag: value for flag, value in flags.items() if value is not None}
    words = " and ".join(f"{flag} {value}" for flag, value in given.items())
    stages = max(1, pipeline.pipeline_model_parallel_size)
    num_counted = num_layers + sum(_counted_ends(pipeline))
    if not given:
        return
    if len(given) == 2:
        yield f"{words} set the same number in two ways: take one of them out"
    elif min(given.values()) < 1:
        yield f"{words} must be at least 1"
    elif stages == 1:
        yield (
            f"{words} divides the stages of a pipeline, and there is one: add "
            "--pipeline-model-parallel-size 2 or more, or leave it out"
        )
    elif (size := pipeline.num_layers_per_virtual_pipeline_stage) and num_counted % (stages * size):
        yield (
            f"{words}: --num-layers {num_layers} is not a multiple of it times "
            f"--pipeline-model-parallel-size {stages} = {stages * size}"
        )
    elif (chunks := chunks_of(pipeline, num_layers)) * stages > num_counted:
        yield (
            f"{words}: {chunks} chunks of {stages} stages are more than --num-layers {num_layers}: "
            "a chunk would have no layer"
        )


def _layout_problems(pipeline: PipelineConfig, depths: int) -> Iterator[str]:
    """Yield what is wrong with the letters of --pipeline-model-parallel-layout."""
    layout = pipeline.pipeline_model_parallel_layout
    chunks = pipeline.num_virtual_stages_per_pipeline_rank
    if layout is None:
        return
    words, parts = f"--pipeline-model-parallel-layout {layout}", _parts_of(layout)
    letters = "".join(parts)
    if others := sorted({*letters} - {*"EtmL"}):
        yield (
            f"{words}: {' '.join(others)} is none of E (embedding), t (transformer layer), m (depth of "
            "multi-token prediction), L (head and loss) and | (end of a stage)"
        )
    elif not (layout.startswith("E") and layout.endswith("L") and {*letters[1:-1]} <= {*"tm"}):
        yield f"{words}: write E once at its beginning, L once at its end, and t for every layer"
    elif letters.count("m") != depths:
        yield f"{words}: m is there {letters.count('m')} times, and --mtp-num-layers is {depths}"
    elif not parts[-1].endswith("m" * depths + "L"):
        yield f"{words}: multi-token prediction is on the last stage: write {'m' * depths}L at its end"
    elif len(parts) > 1 and pipeline.pipeline_model_parallel_size == 1:
        yield (
            f"{words} has {len(parts)} stages, and --pipeline-model-parallel-size is 1: write the "
            "number of ranks that share them"
        )
    elif len(parts) % max(1, pipeline.pipeline_model_parallel_size):
        yield (
            f"{words} has {len(parts)} stages, which is not a multiple of "
            f"--pipeline-model-parallel-size {pipeline.pipeline_model_parallel_size}"
        )
    elif chunks and chunks * pipeline.pipeline_model_parallel_size != len(parts):
        yield (
            f"{words} has {len(parts)} stages, and --num-virtual-stages-per-pipeline-rank {chunks} "
            f"makes {chunks * pipeline.pipeline_model_parallel_size}: leave the latter out"
        )


def _method_problems(method: str) -> Iterator[str]:
    """Yield what is wrong with --pp-partition-method by itself."""
    words = f"--pp-partition-method {method}"
    if method.startswith(LAYERS):
        if not re.fullmatch(r"\d+(,\d+)*", method.removeprefix(LAYERS)):
            yield f"{words}: write the number of layers of each stage, as layers:3,4,4,3"
    elif method.startswith("type:"):
        if ":" in method.removeprefix("type:"):
            yield f"{words}: DeepSpeed takes no second colon"
        try:
            re.compile(method.removeprefix("type:"))
        except re.error as error:
            yield f"{words}: not a regular expression ({error})"
    elif method not in ("uniform", "parameters"):
        yield f"{words} is not one of type:REGEX, layers:N,N,..., uniform, parameters"


_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,3})|([^()*,])\*(\d{1,3})")


def _parts_of(layout: str) -> list[str]:
    """Return the letters of each stage or chunk of --pipeline-model-parallel-layout.

    Source: flag of Megatron-LM.
    """
    layout, count = re.sub("[, ]", "", layout), 1
    while count:
        layout, count = _REPEATED.subn(
            lambda found: (found[3] or found[1]) * int(found[4] or found[2]), layout, count=1
        )
    return layout.split("|")
