"""Which linear layers get low-rank adapters, decided."""

from collections.abc import Iterator, Sequence

from megatron.config.config import Config

LINEAR = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
"""The linear layers of a transformer layer, front to back."""

_FUSED = {
    "query_key_value": (("q_proj", "k_proj", "v_proj"), ("c_attn",)),
    "dense": (("o_proj",), ("c_proj",)),
    "dense_h_to_4h": (("gate_proj", "up_proj"), ("c_fc",)),
    "dense_4h_to_h": (("down_proj",), ("c_proj",)),
}
"""What each is in Hugging Face's models; several are one matrix here, and get one adapter."""

_ALL = "all-linear"


def lora_targets(said: Sequence[str] | None) -> tuple[str, ...]:
    """Return the linear layers that `said` names, in their order.

    >>> lora_targets(["q_proj", "k_proj", "v_proj", "down_proj"])
    ('query_key_value', 'dense_4h_to_h')
    """
    names = {"query_key_value"} if said is None else set(said)
    return tuple(
        own
        for own in LINEAR
        if names & {own, _ALL} or any(names.issuperset(theirs) for theirs in _FUSED[own])
    )


def lora_problems(config: Config) -> Iterator[str]:
    """Yield every reason why no adapters can be built as asked."""
    lora = config.lora
    if lora.lora_rank < 0:
        yield f"--lora-rank {lora.lora_rank} must be at least 0"
    if not lora.lora_rank:
        said = {
            "--lora-alpha": lora.lora_alpha is not None,
            "--lora-dropout": lora.lora_dropout != 0,
            "--lora-target-modules": lora.lora_target_modules is not None,
        }
        yield from (f"{flag} is of adapters: give --lora-rank" for flag in said if said[flag])
        return
    if lora.lora_alpha is not None and lora.lora_alpha <= 0:
        yield f"--lora-alpha {lora.lora_alpha} must be more than 0"
    if not 0 <= lora.lora_dropout < 1:
        yield f"--lora-dropout {lora.lora_dropout} must be at least 0 and less than 1"
    if config.experts.num_experts:
        yield "--lora-rank and --num-experts exclude each other: experts get no adapters"
    if config.optimizer.bitfit:
        yield "--lora-rank and --bitfit exclude each other: each trains its own weights alone"
    yield from _target_problems(lora.lora_target_modules or ["query_key_value"])


def _target_problems(said: Sequence[str]) -> Iterator[str]:
    groups = {name: theirs for of in _FUSED.values() for theirs in of for name in theirs}
    for name in said:
        if name not in (*LINEAR, _ALL, *groups):
            known = ", ".join([*LINEAR, *groups, _ALL])
            yield f"--lora-target-modules {name} is no linear layer; known are {known}"
    for theirs in dict.fromkeys(groups[name] for name in said if name in groups):
        if missing := [name for name in theirs if name not in said]:
            yield (
                f"--lora-target-modules: {', '.join(theirs)} are one matrix here and get one "
                f"adapter: name {', '.join(missing)} too"
            )
