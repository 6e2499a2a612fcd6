"""How the origin of a training sample is told."""

from megatron.data.origin import Origin
from megatron.plan.batch_plan import BatchPlan


def reader(batch: BatchPlan, place: int) -> str:
    """Return who reads the sample at `place` of a step."""
    turn, within = divmod(place, batch.micro_batch_size * batch.data_parallel_size)
    return f"replica {within // batch.micro_batch_size} micro-batch {turn}"


def told(origin: Origin) -> str:
    """Return where a sample comes from: document[first token:token after the last]."""
    pieces = " ".join(f"{piece.document}[{piece.start}:{piece.stop}]" for piece in origin.pieces)
    return f"{origin.prefix} sample {origin.sample} | documents {pieces}"
