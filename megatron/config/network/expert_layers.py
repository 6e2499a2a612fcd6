"""Which layers have experts, and how many."""

from megatron.config.network.experts import ExpertConfig
from megatron.config.network.layer_pattern import is_of_layers, pattern_of


def experts_of_layers(experts: ExpertConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of experts of each layer, 1 for an ordinary MLP; () where all are.

    Raises:
        ValueError: --moe-layer-freq or the length of --num-experts does not fit the layers.
    """
    if experts.num_experts is None:
        return ()
    places = _places(experts, num_layers)
    counts = experts.num_experts
    if max(counts) > 1 and not any(places):
        raise ValueError(
            f"--num-experts: none of the {num_layers} layers would have experts; write "
            "--expert-interval 1"
        )
    if len(counts) == 1:
        counts = counts * sum(places)
    if len(counts) != sum(places):
        raise ValueError(
            f"--num-experts has {len(counts)} numbers, but {sum(places)} of {num_layers} layers have "
            "experts: give one number for all, or one for each of these"
        )
    left = iter(counts)
    numbers = tuple(next(left) if has_experts else 1 for has_experts in places)
    return numbers if max(numbers) > 1 else ()


def _places(experts: ExpertConfig, num_layers: int) -> list[bool]:
    """Return which layers have experts."""
    if experts.moe_layer_freq is None:
        interval = experts.expert_interval or 2
        return [number % interval == 0 for number in range(1, num_layers + 1)]
    said = experts.moe_layer_freq
    pattern = pattern_of(said)
    if isinstance(pattern, int) and pattern > 0:
        return [layer % pattern == 0 for layer in range(num_layers)]
    if not is_of_layers(pattern, num_layers):
        raise ValueError(
            f"--moe-layer-freq {said} is neither a number from 1 on nor a list of {num_layers} times "
            "0 or 1, such as [0]*1+[1]*3"
        )
    return [bool(place) for place in pattern]
