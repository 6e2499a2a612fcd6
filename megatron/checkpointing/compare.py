"""Compare the plan in a checkpoint with a resuming run's: refuse or list the differences."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os.path import commonprefix
from typing import Any

from megatron.common.errors import WrongCheckpointError
from megatron.common.extensions import declarations_in
from megatron.config.architecture.architecture import Architecture, network_named, network_of
from megatron.config.architecture.partition import bounds_of, entries_of_rank
from megatron.config.flag_names import flag_and_value, is_in_weights
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model_spec import NO_HEAD, defaults_of, names_of, spec_of
from megatron.config.network_contract import is_chosen_by_flag
from megatron.config.parallelism.layout import ParallelPlan

_WIDTH = 40
"""Columns of a value in a table; of a longer value, the columns around the first difference."""


@dataclass(frozen=True)
class Difference:
    """An option with one value in the checkpoint and another in this run."""

    name: str
    then: Any
    now: Any


def table(differences: Iterable[Difference], *, what: str = "flag") -> str:
    """Format differences as a table with a heading, one line each.

    Args:
        what: heading of the first column.
    """
    rows = [(what, "in the checkpoint", "now")]
    rows += [(each.name, *_texts(each)) for each in differences]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {then:<{widths[1]}}  {now}" for name, then, now in rows
    )


def _texts(difference: Difference) -> tuple[str, str]:
    both = [
        "-" if value is None or value == "" else str(value)
        for value in (difference.then, difference.now)
    ]
    same = len(commonprefix(both))
    start = max(0, same - _WIDTH // 4) if max(map(len, both)) > _WIDTH else 0
    then, now = (_shorten("…" + text[start:] if start else text) for text in both)
    return then, now


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


_OF_LAYOUT = ("padded_vocab_size",)
"""Fields of the network that follow from the layout."""

_DEFAULTS = defaults_of()
_LAYOUT_DEFAULTS = {
    each.name: each.default for each in fields(ParallelPlan) if each.default is not MISSING
}
"""Values of fields of the layout that checkpoints of older versions do not have."""

_GRID = ("tensor", "pipeline", "sequence", "data")

_COMPARED_SECTIONS = (
    "training",
    "curriculum",
    "schedule",
    "batch",
    "optimizer",
    "precision",
    "data",
    "masks",
    "objective",
    "evaluation",
    "kernels",
    "plugins",
)


_NOT_IN_STEP = {
    "training": (
        "train_samples",  # follows from the iterations and the batch
        "exit_interval",
        "exit_after_minutes",
        "exits_on_signal",
        "kill_switch",
        "replica_check_interval",
    ),
    "data": ("cache_path", "chat_template"),
}
"""Options that do not change a training step."""

_DERIVED = ("num_samples", "data_parallel_size")
"""Values in any section that follow from others."""


def require_same(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    folder: str,
    *,
    with_optimizer: bool = True,
    with_schedule: bool = False,
    with_samples: bool = False,
) -> None:
    """Refuse a checkpoint of another network, dtype, optimizer, learning rate or sample order.

    Args:
        then: the plan in the checkpoint's manifest, as nested dictionaries.
        now: this run's plan, likewise.
        with_optimizer: whether the optimizer state is loaded too.
        with_schedule: whether the learning-rate schedule must be the saved run's.
        with_samples: whether the run continues after the samples that the saved run consumed.

    Raises:
        WrongCheckpointError: lists every difference.
    """
    same_optimizer = ("name", "biases_only", "frozen")
    added: tuple[str, ...] = ()
    if not with_optimizer:
        added += names_of(LoraSpec) if adds_adapters(then, now) else ()
        added += (*NO_HEAD, *_own_fields(now)) if replaces_head(then, now) else ()
        added += ("architecture", *_network(now).added_options) if extends(then, now) else ()
    found = [
        *_differences(then, now, "model", skip=(*_OF_LAYOUT, *added), in_weights=True),
        # Weights alone are cast.
        *(_differences(then, now, "precision", only=("dtype",)) if with_optimizer else ()),
        *(_differences(then, now, "optimizer", only=same_optimizer) if with_optimizer else ()),
    ]
    if with_optimizer and has_other_task(then, now):
        found.append(Difference("--task", task_in(then), task_in(now)))
    refusals = []
    if then["model"].get("lora_rank") and not now["model"]["lora_rank"]:
        refusals.append(
            f"{folder} has LoRA adapters, and this run has none: give --lora-rank and its other flags "
            "as that run had them; or merge the adapters, with tools/convert_checkpoint/to_hf.py, and "
            "import the result with tools/convert_checkpoint/from_hf.py"
        )
    elif found:
        refusals.append(
            f"{folder} was saved by a run with other values of options that must be equal; use those of the "
            "checkpoint (for the network, leave the flags out and write --use-checkpoint-args), "
            f"or give another --load:\n{table(found)}"
        )
    if with_schedule and not found:
        refusals += _schedule_problems(then, now, folder)
    if with_samples:
        refusals += _sample_order_problems(then, now, folder)
    if refusals:
        raise WrongCheckpointError("\n".join(refusals))


def _schedule_problems(
    then: Mapping[str, Any], now: Mapping[str, Any], folder: str
) -> Iterator[str]:
    rates = _schedule_differences(then, now)
    if not rates:
        return
    text = (
        f"{folder} was saved by a run with another learning-rate schedule; write "
        "--override-opt_param-scheduler to continue with that of the flags, as for a longer run, or "
        "--use-checkpoint-opt_param-scheduler to continue with that of the checkpoint:\n"
        + table(rates)
    )
    if any(each.name in ("--lr-decay-samples", "--lr-decay-tokens") for each in rates):
        text += (
            "\n  (the decay ends with the run where no --lr-decay-… flag is given; its iterations "
            "times --global-batch-size are its samples)"
        )
        if task_in(now):
            text += "\n  (--epochs is the length of the run)"
    yield text


def _sample_order_problems(
    then: Mapping[str, Any], now: Mapping[str, Any], folder: str
) -> list[str]:
    saved, order = then["data"]["sample_order"], now["data"]["sample_order"]
    if saved == order:
        return []
    return [
        f"{folder} was saved by a run with --sample-order {saved}, and this run has {order}, which "
        "would train on some samples again and never on others; write "
        f"--sample-order {saved}, or --finetune to start again with the weights alone"
    ]


def _schedule_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    skip: tuple[str, ...] = ("on_resume",)
    if then["schedule"]["style"] == now["schedule"]["style"] == "constant":
        skip += ("decay", "floor", "embedding_floor")
    return [*_differences(then, now, "schedule", skip=skip)]


def require_same_model(then: Mapping[str, Any], now: Mapping[str, Any], folder: str) -> None:
    """Refuse a checkpoint of another network; see `require_same`."""
    if found := [*_differences(then, now, "model", in_weights=True)]:
        raise WrongCheckpointError(
            f"{folder} holds another network than the flags describe:\n{table(found)}"
        )


_FOLLOWS = {
    "model.ffn_hidden_size": ("model.hidden_size",),
    "model.head_dim": ("model.hidden_size", "model.num_attention_heads"),
    "model.num_query_groups": ("model.num_attention_heads",),
}
"""Sizes that may follow from others, by field: where these differ, the table has these alone."""


_GROUPS = ("decays_qk_norms", "embeddings_apart")
"""Decisions that put parameters into other groups, whose state DeepSpeed finds by their number."""


def layout_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """List the differences of layout, and of parameter groups, which make a checkpoint need resharding."""
    # Schedules with the same chunks have the same layers on each stage.
    skip = ("splits_backward", *(("partition_method",) if _have_same_stages(then, now) else ()))
    return [
        *_differences(then, now, "model", only=_OF_LAYOUT),
        *_differences(then, now, "parallel", skip=skip),
        *_differences(then, now, "precision", only=("dtype", "fp32_gradients")),
        *_differences(then, now, "optimizer", only=_GROUPS),
    ]


def _have_same_stages(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether each stage has the same layers, however the division is written."""
    methods = {plan["parallel"]["partition_method"] for plan in (then, now)}
    if len(methods) == 1 or max(plan["parallel"]["pipeline"] for plan in (then, now)) == 1:
        return True
    return _stages(then) == _stages(now)


def _stages(plan: Mapping[str, Any]) -> list[int]:
    """Return the bounds of the stages of a plan in the list of layers."""
    saved, spec = plan["parallel"], spec_of(plan["model"])
    names = [each.name for each in fields(ParallelPlan) if each.name in saved]
    parallel = ParallelPlan(**{name: saved[name] for name in names})
    mixed = plan["precision"]["dtype"] != "fp32"
    return bounds_of(entries_of_rank(network_of(spec), spec, parallel, mixed=mixed), parallel)


def adds_adapters(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether this run adds LoRA adapters to a checkpoint without any."""
    return bool(now["model"]["lora_rank"]) and not then["model"].get("lora_rank")


def replaces_head(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether this run has the head of a downstream task and the checkpoint another one or none."""
    if not now["model"]["num_outputs"]:
        return False
    fields = ("num_outputs", "head_layers", "first_token_head")
    differ = any(now["model"][f] != then["model"].get(f, _DEFAULTS[f]) for f in fields)
    return differ or has_other_task(then, now)


def has_other_task(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has the head of another downstream task than this run.

    A task with user-defined labels has the same head as any other task with these labels.
    """
    saved, current = task_in(then), task_in(now)
    if not saved or not current or saved == current:
        return False
    labels = [labels_in(plan) for plan in (then, now)]
    is_own = "text-classification" in (saved, current)
    return not (is_own and labels[0] == labels[1])


def task_in(plan: Mapping[str, Any]) -> str:
    """Return the downstream task that a plan learns; "" for none."""
    return str((plan.get("objective", {}).get("own") or {}).get("task", ""))


def labels_in(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the outputs of a head, as in a manifest's plan; () without names."""
    task = task_in(plan)
    known = (classes_of(task) for classes_of in declarations_in("declarations", "classes_of"))
    return tuple(plan["model"].get("labels", ())) or next(filter(None, known), ())


def extends(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether this run adds weights to a checkpoint of another network, which it extends."""
    return _network(now).extends == then["model"].get("architecture", "gpt")


def _network(plan: Mapping[str, Any]) -> type[Architecture]:
    return network_named(plan["model"].get("architecture", "gpt"))


def _own_fields(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that only networks of this architecture have."""
    part = _network(plan).part
    return names_of(part) if part else ()


def has_same_ranks(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether every rank has the same coordinates in the grid as before."""
    return not [*_differences(then, now, "parallel", only=_GRID)]


def require_reshapable(
    then: Mapping[str, Any], changes: Sequence[Difference], folder: str, *, with_optimizer: bool
) -> None:
    """Refuse a checkpoint of another layout that resharding does not support.

    Args:
        changes: differences of layout.
        with_optimizer: whether the optimizer state is loaded too.

    Raises:
        WrongCheckpointError: with the reasons.
    """
    reasons = []
    if with_optimizer and then["optimizer"]["name"] == "adam8bit":
        way = "write --no-load-optim"
        if [each.name for each in changes] == ["parallel.bucket_size"]:
            way += (
                ", or the bucket size of the checkpoint; without one, "
                '"bf16": {"immediate_grad_update": false} in the JSON of --deepspeed_config'
            )
        reasons.append(f"Adam's 8-bit state is scaled in blocks of its layout: {way}")
    if changes and reasons:
        raise WrongCheckpointError(
            f"{folder} was saved in another layout, and cannot be reshaped ({'; '.join(reasons)}):\n"
            + table(changes)
        )


def other_changes(
    then: Mapping[str, Any], now: Mapping[str, Any], *, only_network: bool = False
) -> Iterator[Difference]:
    """Yield the changed options that a resuming run may change.

    Args:
        only_network: whether no more is known of the run that saved the checkpoint.
    """
    yield from _differences(then, now, "model", in_weights=False)
    for section in () if only_network else _COMPARED_SECTIONS:
        if section in then:
            # Options that the saving version did not have cannot differ.
            unknown = set(now[section]) - set(then[section])
            skip = ("on_resume", *_NOT_IN_STEP.get(section, ()), *unknown)
            skip += _GROUPS if section == "optimizer" else ()
            # Files and options of a task; another task is refused.
            skip += ("own",) if section == "objective" and task_in(now) else ()
            saved, current = ({section: _without_derived(plan[section])} for plan in (then, now))
            yield from _differences(saved, current, section, skip=skip)


def _without_derived(options: Any) -> Any:
    """Drop the samples of each dataset, which the run's length decides, and the layout's replicas."""
    if isinstance(options, Mapping):
        return {k: _without_derived(v) for k, v in options.items() if k not in _DERIVED}
    return [*map(_without_derived, options)] if isinstance(options, list | tuple) else options


def _is_in_weights(field: str, model: Mapping[str, Any]) -> bool:
    """Return whether the weights of a network depend on one of its fields, given with its section."""
    if field == "model.max_position_embeddings":
        return bool(model["position_embedding"] == "learned")  # a row for each position
    return is_in_weights(field)


def _differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    section: str,
    *,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    in_weights: bool | None = None,
) -> Iterator[Difference]:
    """Yield the differing options of a section.

    Args:
        in_weights: whether to yield those that weights depend on, or the others; None for both.
    """
    names = only or sorted({*then[section], *now[section]} - set(skip))
    older = {"model": _DEFAULTS, "parallel": _LAYOUT_DEFAULTS}.get(section, {})
    for name in names:
        saved, current = (
            _as_json(plan[section].get(name, older.get(name))) for plan in (then, now)
        )
        if name == "own_flags":
            yield from _own_differences(dict(saved or ()), dict(current or ()), in_weights)
            continue
        if isinstance(saved, dict) and isinstance(current, dict):
            part = f"{section}.{name}"
            yield from _differences({part: saved}, {part: current}, part)
            continue
        # Options that the saving version did not have were off.
        if saved != current and (current or name in then[section]):
            if in_weights not in (None, _is_in_weights(f"{section}.{name}", now[section])):
                continue
            if any(_differs(then, now, cause) for cause in _FOLLOWS.get(f"{section}.{name}", ())):
                continue
            in_tokens = now[section].get("unit") == "tokens"
            (flag, saved), (_, current) = (
                flag_and_value(f"{section}.{name}", v, in_tokens=in_tokens)
                for v in (saved, current)
            )
            if name == "architecture" and any(map(is_chosen_by_flag, (saved, current))):
                flag = "--network"
            yield Difference(flag, saved, current)


def _differs(then: Mapping[str, Any], now: Mapping[str, Any], field: str) -> bool:
    section, _, name = field.partition(".")
    return bool(then[section].get(name) != now[section].get(name))


def _own_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], in_weights: bool | None
) -> Iterator[Difference]:
    """Yield the differing flags of plugins' parts, None where there is no such flag."""
    for name in sorted({*then, *now}):
        saved, current = then.get(name), now.get(name)
        if saved != current and in_weights in (None, is_in_weights(f"own_flags.{name}")):
            (flag, saved), (_, current) = (
                flag_and_value(f"own_flags.{name}", value) for value in (saved, current)
            )
            yield Difference(flag, saved, current)


def _as_json(value: Any) -> Any:
    """Return `value` as a manifest holds it."""
    if isinstance(value, Mapping):
        return {name: _as_json(part) for name, part in value.items()}
    return [*map(_as_json, value)] if isinstance(value, list | tuple) else value
