"""Low-rank adapters (LoRA): flags, the layers that get them, and checks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: low-rank adapters added to the linear layers."""

    lora_rank: int = setting(0, at_least=0)
    """Rank of the adapters; 0 for none. With adapters, all other weights are frozen."""

    lora_alpha: float | None = setting(None, above=0, matters=False)
    """Scale of the adapters' output: --lora-alpha / --lora-rank (default: 1)."""

    lora_dropout: float = setting(0.0, at_least=0, below=1, matters=False, in_weights=False)
    """Dropout probability of an adapter's input features."""

    lora_target_modules: list[str] | None = None
    """Linear layers that get adapters: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or
    their names in Hugging Face's models, such as q_proj k_proj v_proj, or all-linear (default:
    query_key_value)."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters (LoRA). The defaults, on disk, stand for a network without adapters."""

    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ()  # linear layers with an adapter

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.lora_alpha / self.lora_rank


LINEAR = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
"""The linear layers of a transformer layer, front to back."""

_FUSED = {
    "query_key_value": (("q_proj", "k_proj", "v_proj"), ("c_attn",)),
    "dense": (("o_proj",), ("c_proj",)),
    "dense_h_to_4h": (("gate_proj", "up_proj"), ("c_fc",)),
    "dense_4h_to_h": (("down_proj",), ("c_proj",)),
}
"""Their names in Hugging Face's models; several are one matrix here, and get one adapter."""

_ALL = "all-linear"


def lora_targets(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the linear layers that `names` selects, in the order of the network.

    >>> lora_targets(["q_proj", "k_proj", "v_proj", "down_proj"])
    ('query_key_value', 'dense_4h_to_h')
    """
    given = {"query_key_value"} if names is None else set(names)
    return tuple(
        own
        for own in LINEAR
        if given & {own, _ALL} or any(given.issuperset(theirs) for theirs in _FUSED[own])
    )


def lora_spec(lora: LoraConfig) -> LoraSpec | None:
    """Return the adapters of a network; None without."""
    if not lora.lora_rank:
        return None
    return LoraSpec(
        lora_rank=lora.lora_rank,
        lora_alpha=float(lora.lora_alpha or lora.lora_rank),
        lora_dropout=lora.lora_dropout,
        lora_target_modules=lora_targets(lora.lora_target_modules),
    )


def lora_problems(lora: LoraConfig, *, num_experts: object, bitfit: bool) -> Iterator[str]:
    """Yield every problem of the adapters' flags.

    Args:
        num_experts: the value of --num-experts.
        bitfit: whether --bitfit is given.
    """
    yield from range_problems(lora)
    if not lora.lora_rank:
        given = {
            "--lora-alpha": lora.lora_alpha is not None,
            "--lora-dropout": lora.lora_dropout != 0,
            "--lora-target-modules": lora.lora_target_modules is not None,
        }
        yield from (f"{flag} is of adapters: give --lora-rank" for flag in given if given[flag])
        return
    yield from range_problems(lora, "lora_alpha", "lora_dropout")
    if num_experts:
        yield "--lora-rank and --num-experts exclude each other: experts get no adapters"
    if bitfit:
        yield "--lora-rank and --bitfit exclude each other: each trains its own weights alone"
    yield from _target_problems(lora.lora_target_modules or ["query_key_value"])


def _target_problems(names: Sequence[str]) -> Iterator[str]:
    groups = {name: theirs for of in _FUSED.values() for theirs in of for name in theirs}
    for name in names:
        if name not in (*LINEAR, _ALL, *groups):
            known = ", ".join([*LINEAR, *groups, _ALL])
            yield f"--lora-target-modules {name} is not a linear layer; known are {known}"
    for theirs in dict.fromkeys(groups[name] for name in names if name in groups):
        if missing := [name for name in theirs if name not in names]:
            yield (
                f"--lora-target-modules: {', '.join(theirs)} are one matrix here and get one "
                f"adapter: name {', '.join(missing)} too"
            )
