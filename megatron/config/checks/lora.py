"""Low-rank adapters (LoRA): checks of their flags."""

from collections.abc import Iterator, Sequence

from megatron.config.checks.start import Start
from megatron.config.network.lora import ALL, FUSED
from megatron.config.network.spec_part import LINEAR_LAYERS
from megatron.config.parsing.declaration import range_problems


def lora_problems(start: Start) -> Iterator[str]:
    """Yield every problem of the adapters' flags."""
    config, lora = start.config, start.config.lora
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
    if config.experts.num_experts:
        yield "--lora-rank and --num-experts exclude each other: experts get no adapters"
    if config.optimizer.bitfit:
        yield "--lora-rank and --bitfit exclude each other: each trains its own weights alone"
    yield from _target_problems(lora.lora_target_modules or ["query_key_value"])


def _target_problems(names: Sequence[str]) -> Iterator[str]:
    groups = {name: theirs for of in FUSED.values() for theirs in of for name in theirs}
    for name in names:
        if name not in (*LINEAR_LAYERS, ALL, *groups):
            known = ", ".join([*LINEAR_LAYERS, *groups, ALL])
            yield f"--lora-target-modules {name} is not a linear layer; known are {known}"
    for theirs in dict.fromkeys(groups[name] for name in names if name in groups):
        if missing := [name for name in theirs if name not in names]:
            yield (
                f"--lora-target-modules: {', '.join(theirs)} are one matrix here and get one "
                f"adapter: name {', '.join(missing)} too"
            )
