"""DeepSpeed's JSON: every number has one owner, the flag.

JSON that repeats a flag is fine, JSON that contradicts it is an error that names both, "auto" and
absent keys are filled in from the flag, and known keys without a flag pass through untouched.
"""

import difflib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.common.errors import raise_if_any
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.optimization.curriculum import KEY as CURRICULUM
from megatron.config.parallelism.deepspeed_keys import (
    has_bf16_optimizer,
    key_problems,
    reduces_in_fp32_at_once,
    renamed_keys,
)
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.json_tree import value_at

ABSENT = object()


@dataclass(frozen=True)
class OwnedKey:
    """A key of the JSON that a flag owns."""

    key: str  # dotted path
    flag: str
    value: Any


def given_keys(section: Any) -> Iterator[OwnedKey]:
    """Yield the keys that the settings of a section own; one that is not given owns nothing."""
    kind: type = type(section)
    for flag in flags_of(kind):
        value = getattr(section, flag.name)
        if flag.setting.ds_key and value != flag.default:
            is_whole = isinstance(value, float) and value.is_integer()
            yield OwnedKey(flag.setting.ds_key, flag.options[0], int(value) if is_whole else value)


def read_ds_config(file: str | None) -> dict[str, Any]:
    """Return the user's JSON, or an empty dictionary when there is none.

    Raises:
        ConfigError: lists every problem of the file.
    """
    content, problems = checked_ds_config(file)
    raise_if_any(problems)
    return content


def checked_ds_config(file: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the user's JSON without its wrong keys, and all problems of it.

    Wrong are unknown keys, keys that stand twice and those of a value of a wrong type. A block whose
    stage, switch or device is wrong is left out as well: other keys cannot be read without it.

    {} for a file that cannot be read, and when there is none.
    """
    if file is None:
        return {}, []
    repeated: list[str] = []
    try:
        text = Path(file).read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=partial(_object_of, repeated=repeated))
    except OSError as error:
        return {}, [f"--deepspeed_config {file}: {error.strerror}"]
    except ValueError as error:
        return {}, [f"--deepspeed_config {file} is not JSON: {error}"]
    except RecursionError:
        return {}, [f"--deepspeed_config {file}: its values are nested too deeply"]
    if not isinstance(content, dict):
        return {}, [f"--deepspeed_config {file}: expected an object at the top"]
    problems = [
        f"--deepspeed_config {file}: the key {key} stands twice in one object"
        for key in dict.fromkeys(repeated)
    ]
    found = [(path, f"{path}: {problem}") for path, problem in key_problems(content)]
    found += _type_problems(content)
    problems += [f"--deepspeed_config {file}: {problem}" for _, problem in found]
    return _without(content, {_left_out(path) for path, _ in found}), problems


def _left_out(path: str) -> str:
    """Return the path of what is not read because of the wrong key at `path`: the key, or its block."""
    section, _, key = path.rpartition(".")
    return section if section and _decides(key) else path


def _decides(key: str) -> bool:
    """Whether the meaning of a block depends on `key`, or on a key that it is a misspelling of."""
    return bool(difflib.get_close_matches(key, ("stage", "enabled", "device"), n=1))


def _without(block: Mapping[str, Any], wrong: Collection[str], section: str = "") -> dict[str, Any]:
    """Return an object of the JSON without the dotted paths `wrong`.

    Args:
        section: the dotted path of `block`, with a dot at its end.
    """
    return {
        key: _without(value, wrong, f"{section}{key}.") if isinstance(value, dict) else value
        for key, value in block.items()
        if f"{section}{key}" not in wrong
    }


def _object_of(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """Return an object of the JSON without its repeated keys, which are added to `repeated`."""
    counts = Counter(key for key, _ in pairs)
    twice = sorted(key for key, count in counts.items() if count > 1)
    repeated += twice
    left_out = counts if any(map(_decides, twice)) else twice
    return {key: value for key, value in pairs if key not in left_out}


_TYPES: dict[str, tuple[type, ...]] = {
    "train_micro_batch_size_per_gpu": (int,),
    "train_batch_size": (int,),
    "gradient_accumulation_steps": (int,),
    "gradient_clipping": (int, float),
    "fp16": (dict,),
    "fp16.enabled": (bool,),
    "fp16.loss_scale": (int, float),
    "fp16.initial_scale_power": (int,),
    "fp16.loss_scale_window": (int,),
    "fp16.hysteresis": (int,),
    "fp16.min_loss_scale": (int, float),
    "bf16": (dict,),
    "bf16.enabled": (bool,),
    "zero_optimization": (dict,),
    "zero_optimization.stage": (int,),
    "activation_checkpointing": (dict,),
    "activation_checkpointing.partition_activations": (bool,),
    "activation_checkpointing.contiguous_memory_optimization": (bool,),
    "activation_checkpointing.cpu_checkpointing": (bool,),
    "activation_checkpointing.synchronize_checkpoint_boundary": (bool,),
    "activation_checkpointing.profile": (bool,),
    "zero_optimization.reduce_scatter": (bool,),
    "zero_optimization.contiguous_gradients": (bool,),
    "zero_optimization.reduce_bucket_size": (int, float),
    "zero_optimization.allgather_bucket_size": (int, float),
    "zero_optimization.zero_hpz_partition_size": (int,),
    "zero_optimization.offload_optimizer": (dict,),
    "zero_optimization.offload_optimizer.device": (str,),
    "zero_optimization.offload_param": (dict,),
    "zero_optimization.offload_param.device": (str,),
}
"""Types of the keys that flags own, and of the objects that hold them."""


def _type_problems(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, types in _TYPES.items():
        value = value_at(content, key, ABSENT)
        # A bool is an int to Python, but not a number to a reader.
        if value is not ABSENT and type(value) not in types:
            wanted = " or ".join(kind.__name__ for kind in types).replace("dict", "object")
            yield key, f"{key} is {json.dumps(value)}, expected {wanted}"


def step_keys(*, batch: BatchPlan, clip_grad: float) -> list[OwnedKey]:
    """Return the keys that the flags of a step own, with the flags' values."""
    # A run that resumes after a ramp may have more replicas than its first size has samples.
    unit = batch.micro_batch_size * batch.data_parallel_size
    start = next((size for size in batch.sizes_from(0) if size % unit == 0), batch.size_at(0))
    return [
        OwnedKey("train_micro_batch_size_per_gpu", "--micro-batch-size", batch.micro_batch_size),
        OwnedKey("train_batch_size", "--global-batch-size", start),
        OwnedKey(
            "gradient_accumulation_steps",
            "--global-batch-size / (--micro-batch-size * replicas)",
            batch.num_micro_batches(start),
        ),
        OwnedKey("gradient_clipping", "--clip-grad", clip_grad),
    ]


def merge_ds_config(
    user: Mapping[str, Any],
    owned: list[OwnedKey],
    *,
    zero_stage: int,
    dtype: str,
    fp32_gradients: bool,
    compiles_optimizer: bool,
    activation_checkpointing: Mapping[str, Any],
    divides_sequence: bool,
    pipeline: int,
    overlaps_reduction: bool,
) -> dict[str, Any]:
    """Merge the plan into the user's JSON; return the JSON that DeepSpeed gets.

    Args:
        fp32_gradients: whether 16-bit training adds gradients up in 32 bits.
        compiles_optimizer: whether the optimizer is DeepSpeed's compiled one.
        overlaps_reduction: whether gradient reduction may overlap with the backward pass.
    """
    merged = _without_auto(user)
    for older, now in renamed_keys(merged).items():
        section, _, key = older.partition(".")
        _put(merged, now, merged[section].pop(key))
    # The optimizer is ours (its constants are flags), and the schedule a function of the samples.
    merged.pop("optimizer", None)
    merged.pop("scheduler", None)
    # Sequences are cut by the loop, which counts their tokens; DeepSpeed would refuse the block.
    merged.pop(CURRICULUM, None)
    for twin in owned:
        _put(merged, twin.key, twin.value)
    if activation_checkpointing:
        merged["activation_checkpointing"] = dict(activation_checkpointing)
    if divides_sequence:
        # Stages would send a part of each tensor and gather the rest on arrival; these tensors
        # are parts already.
        _put(merged, "pipeline.pipe_partitioned", False)
        _put(merged, "pipeline.grad_partitioned", False)
    _put(merged, "zero_optimization.stage", zero_stage)
    silent = _silent_defaults(zero_stage=zero_stage, dtype=dtype, fp32_gradients=fp32_gradients)
    if value_at(merged, "zero_optimization.offload_optimizer") and not compiles_optimizer:
        # torch's Adam steps on the CPU as fast, and need not be compiled first.
        silent["zero_force_ds_cpu_optimizer"] = False
    _put_absent(merged, silent)
    if overlaps_reduction:
        _put_absent(merged, _overlap_defaults(merged, zero_stage, pipeline=pipeline))
    return merged


BUCKET = 50_000_000
"""Elements of a bucket. DeepSpeed's 5e8 are more than most models have: nothing would overlap."""


def _overlap_defaults(
    merged: Mapping[str, Any], zero_stage: int, *, pipeline: int
) -> dict[str, Any]:
    """Return values for absent keys that overlap gradient reduction, to owners, with the backward pass."""
    defaults: dict[str, Any] = {"reduce_bucket_size": BUCKET} if zero_stage else {}
    if has_bf16_optimizer(merged):
        defaults["allgather_bucket_size"] = BUCKET
    elif zero_stage in (1, 2):
        # Otherwise a bucket with gradients of several owners is all-reduced.
        defaults |= {"contiguous_gradients": True, "use_multi_rank_bucket_allreduce": False}
        if pipeline == 1:
            defaults["overlap_comm"] = True  # DeepSpeed's pipelines have none
    return {f"zero_optimization.{key}": value for key, value in defaults.items()}


def bucket_size(merged: Mapping[str, Any]) -> int:
    """Return the most elements that the bf16 optimizer of several replicas reduces or gathers at a time.

    Args:
        merged: what DeepSpeed gets.

    Returns:
        0 if it does not reduce during the backward pass.
    """
    if not reduces_in_fp32_at_once(merged):
        return 0
    zero = merged["zero_optimization"]
    return max(1, int(min(zero["reduce_bucket_size"], zero["allgather_bucket_size"])))


def _silent_defaults(*, zero_stage: int, dtype: str, fp32_gradients: bool) -> dict[str, Any]:
    """Return values for absent keys whose default in DeepSpeed would do harm."""
    defaults: dict[str, Any] = {
        # The loop prints; DeepSpeed's own progress line stays quiet.
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        # It waits for the device twice in each micro-batch; the loop measures steps.
        "timers.throughput.enabled": False,
        "timers.throughput.synchronized": False,
    }
    if dtype == "bf16":
        # Adds each gradient to the fp32 sum as soon as it is there, and frees it.
        defaults["bf16.immediate_grad_update"] = True
    if dtype != "fp32" and fp32_gradients:
        # 16-bit floats have few digits: sums over micro-batches and ranks need 32 bits.
        defaults |= {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}
    if dtype == "fp16":
        defaults |= {
            "fp16.loss_scale": 0,
            "fp16.initial_scale_power": 32,
            "fp16.loss_scale_window": 1000,
            "fp16.hysteresis": 2,
            "fp16.min_loss_scale": 1,
        }
    if zero_stage == 3:
        defaults["zero_optimization.memory_efficient_linear"] = False
    return defaults


def _without_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value != "auto"
    }


def _put_absent(tree: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value_at(tree, key, ABSENT) is ABSENT:
            _put(tree, key, value)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value
