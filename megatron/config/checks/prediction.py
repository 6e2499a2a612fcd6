"""Multi-token prediction (MTP): checks of its flags, and of what it is not built for."""

from collections.abc import Iterator

from megatron.common.registry import OBJECTIVES, POSITION_EMBEDDINGS
from megatron.config.checks.start import Start
from megatron.config.network.model_resolution import position_of
from megatron.config.network.prediction import PredictionConfig
from megatron.config.parallelism.layout import sequence_flags
from megatron.config.parsing.declaration import range_problems


def prediction_problems(start: Start) -> Iterator[str]:
    """Yield why a run cannot train multi-token prediction."""
    config, prediction = start.config, start.config.prediction
    yield from range_problems(prediction)
    if prediction.mtp_num_layers < 1:
        defaults = PredictionConfig()
        given = {
            "--mtp-loss-scaling-factor": prediction.mtp_loss_scaling_factor
            != defaults.mtp_loss_scaling_factor,
            "--mtp-use-repeated-layer": prediction.mtp_use_repeated_layer,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            yield f"{flag} is of multi-token prediction: give --mtp-num-layers"
        return
    yield from range_problems(prediction, "mtp_loss_scaling_factor")
    position = position_of(config.model)
    unbuilt = {
        "--position-embedding-type learned_absolute": position == "learned",
        f"--position-embedding-type {position}": POSITION_EMBEDDINGS.is_own(position),
        "--embed-layernorm": config.model.embed_layernorm or config.optimizer.use_bnb_optimizer,
        "--lora-rank": config.lora.lora_rank > 0,
        "prefixes whose tokens see each other": start.declaration.sees_prefix
        or config.objective.prefixlm,
        "the objective of a plugin": OBJECTIVES.is_own(start.objective),
        **{flag: size > 1 for flag, size in sequence_flags(config.parallel).items()},
    }
    for what in (what for what, is_given in unbuilt.items() if is_given):
        yield (
            f"--mtp-num-layers {prediction.mtp_num_layers}: multi-token prediction is not built for "
            f"{what}: leave one of them out"
        )
