"""What a run that goes on from a checkpoint may not change, and what it should be told of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os.path import commonprefix
from typing import Any

from megatron.common.errors import WrongCheckpointError
from megatron.config.flag_names import flag_and_value
from megatron.config.network.model_spec import ModelSpec

_WIDTH = 40
"""Columns of a value; of one that is longer, those are told where the difference lies."""


@dataclass(frozen=True)
class Difference:
    """Something with two values."""

    name: str
    then: Any
    now: Any


def table(differences: Iterable[Difference], *, what: str = "flag") -> str:
    """Return a line for each difference under a heading, in columns.

    Args:
        what: what the names are those of.
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
    then, now = (_cut("…" + text[start:] if start else text) for text in both)
    return then, now


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


_NOT_IN_WEIGHTS = (
    "attention_dropout",
    "hidden_dropout",
    "init",
    "init_std",
    "seq_length",
    "fp32_residual",
    "query_key_layer_scaling",
    "lora_dropout",
    "padded_vocab_in_softmax",
)
"""Parts of the network that no weight depends on."""

_OF_LAYOUT = ("padded_vocab_size",)
"""Parts of the network that follow from how it is divided."""

_ADAPTERS = ("lora_rank", "lora_alpha", "lora_target_modules")
"""What weights beside those of the network there are."""

_OLDER_NETWORKS = {
    each.name: each.default for each in fields(ModelSpec) if each.default is not MISSING
}
"""What a network computes that was saved before there was a choice, by field."""

_GRID = ("tensor", "pipeline", "sequence", "data")

_WISHES = (
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
)


_NOT_IN_STEPS = {
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
"""Wishes that change nothing in a step."""


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
        with_optimizer: whether its state is taken too.
        with_schedule: whether the learning rate must be that of the saved run.
        with_samples: whether the run continues after the samples that the saved run consumed.

    Raises:
        WrongCheckpointError: lists every difference.
    """
    same_optimizer = ("name", "biases_only")
    adapters = _ADAPTERS if adds_adapters(then, now) and not with_optimizer else ()
    found = [
        *_differences(then, now, "model", skip=(*_not_in_weights(now), *_OF_LAYOUT, *adapters)),
        # Weights alone are cast.
        *(_differences(then, now, "precision", only=("dtype",)) if with_optimizer else ()),
        *(_differences(then, now, "optimizer", only=same_optimizer) if with_optimizer else ()),
    ]
    refusals = []
    if found:
        refusals.append(
            f"{folder} was saved by a run that differs in what must be equal; take what is in the "
            "checkpoint (for the network, leave the flags out and write --use-checkpoint-args), "
            f"or give another --load:\n{table(found)}"
        )
    if with_schedule and (rates := _of_schedule(then, now)):
        text = (
            f"{folder} was saved by a run with another learning-rate schedule; write "
            "--override-opt_param-scheduler to go on with that of the flags, or "
            "--use-checkpoint-opt_param-scheduler to go on with that of the checkpoint:\n"
            + table(rates)
        )
        if any(each.name in ("--lr-decay-samples", "--lr-decay-tokens") for each in rates):
            text += (
                "\n  (the decay ends with the run where no --lr-decay-… flag is given; its iterations "
                "times --global-batch-size are its samples)"
            )
        refusals.append(text)
    if with_samples:
        refusals += _of_sample_order(then, now, folder)
    if refusals:
        raise WrongCheckpointError("\n".join(refusals))


def _of_sample_order(then: Mapping[str, Any], now: Mapping[str, Any], folder: str) -> list[str]:
    # Checkpoints from before this flag are of runs with its first value.
    saved = then.get("data", {}).get("sample_order", "bigscience")
    order = now["data"]["sample_order"]
    if saved == order:
        return []
    return [
        f"{folder} was saved by a run with --sample-order {saved}, and this run has {order}, which "
        "would train on some samples again and never on others; write "
        f"--sample-order {saved}, or --finetune to start over with the weights alone"
    ]


def _of_schedule(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    skip: tuple[str, ...] = ("on_resume",)
    if then["schedule"]["style"] == now["schedule"]["style"] == "constant":
        skip += ("decay", "floor")
    return [*_differences(then, now, "schedule", skip=skip)]


def require_same_model(then: Mapping[str, Any], now: Mapping[str, Any], folder: str) -> None:
    """Refuse a checkpoint of another network; see `require_same`."""
    if found := [*_differences(then, now, "model", skip=_not_in_weights(now))]:
        raise WrongCheckpointError(
            f"{folder} holds another network than asked for:\n{table(found)}"
        )


def layout_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the differences in how weights and optimizer are divided, and so lie in files."""
    stages = then["parallel"]["pipeline"], now["parallel"]["pipeline"]
    skip = () if max(stages) > 1 else ("partition_method",)
    return [
        *_differences(then, now, "model", only=_OF_LAYOUT),
        *_differences(then, now, "parallel", skip=skip),
        *_differences(then, now, "precision", only=("dtype", "fp32_gradients")),
    ]


def adds_adapters(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether this run puts adapters beside the weights of one that had none."""
    return bool(now["model"]["lora_rank"]) and not then["model"].get("lora_rank")


def has_same_ranks(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether each rank has the same place as it had."""
    return not [*_differences(then, now, "parallel", only=_GRID)]


def require_reshapable(
    then: Mapping[str, Any], changes: Sequence[Difference], folder: str, *, with_optimizer: bool
) -> None:
    """Refuse a checkpoint of another layout that cannot be brought into this one.

    Args:
        changes: what differs.
        with_optimizer: whether its state is taken too.

    Raises:
        WrongCheckpointError: says why.
    """
    reasons = []
    if then["model"].get("num_experts"):
        reasons.append("experts stay with the ranks that have them")
    if with_optimizer and then["optimizer"]["name"] == "adam8bit":
        reasons.append(
            "Adam's 8-bit state is scaled in blocks of its layout: write --no-load-optim"
        )
    if changes and reasons:
        raise WrongCheckpointError(
            f"{folder} was saved in another layout, and cannot be reshaped ({'; '.join(reasons)}):\n"
            + table(changes)
        )


def other_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield every difference that a run may have from the one that it goes on from."""
    yield from _differences(then, now, "model", only=_not_in_weights(now))
    for section in _WISHES:
        if section in then:
            # What the saving program did not know of is no wish of that run.
            unknown = set(now[section]) - set(then[section])
            skip = ("on_resume", *_NOT_IN_STEPS.get(section, ()), *unknown)
            saved, asked = ({section: _uncounted(plan[section])} for plan in (then, now))
            yield from _differences(saved, asked, section, skip=skip)


def _uncounted(wishes: Any) -> Any:
    """Return `wishes` without the samples of data sets, which follow from the run's length."""
    if isinstance(wishes, Mapping):
        return {k: _uncounted(v) for k, v in wishes.items() if k != "num_samples"}
    return [*map(_uncounted, wishes)] if isinstance(wishes, list | tuple) else wishes


def _not_in_weights(now: Mapping[str, Any]) -> tuple[str, ...]:
    if now["model"]["position_embedding"] == "learned":
        return _NOT_IN_WEIGHTS
    # Only a learned table has a row for each position.
    return (*_NOT_IN_WEIGHTS, "max_position_embeddings")


def _differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    section: str,
    *,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
) -> Iterator[Difference]:
    names = only or sorted({*then[section], *now[section]} - set(skip))
    older = _OLDER_NETWORKS if section == "model" else {}
    for name in names:
        saved, asked = (_as_json(plan[section].get(name, older.get(name))) for plan in (then, now))
        # What the saving program did not know of was off.
        if saved != asked and (asked or name in then[section]):
            in_tokens = now[section].get("unit") == "tokens"
            (flag, saved), (_, asked) = (
                flag_and_value(f"{section}.{name}", v, in_tokens=in_tokens) for v in (saved, asked)
            )
            yield Difference(flag, saved, asked)


def _as_json(value: Any) -> Any:
    """Return `value` as a manifest holds it."""
    return list(value) if isinstance(value, tuple) else value
