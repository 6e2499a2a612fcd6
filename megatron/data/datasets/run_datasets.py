"""Types of a run's data: its datasets, views of samples, and requests for custom datasets."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.config.data.corpora import DataPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.config.optimization.batch_size import BatchPlan
from megatron.data.sampling.provenance import TracedSource

View = Callable[[TracedSource], TracedSource]
"""View of a dataset: wraps its samples for an objective."""


@dataclass(frozen=True)
class RoleView:
    """View that is another one for training, validation and test.

    Args:
        of: returns it for "train", "valid" or "test" and the number of samples that the run takes.
    """

    of: Callable[[str, int], View]


@dataclass(frozen=True)
class CorpusUse:
    """Use of one corpus by a dataset: its documents, samples and epochs."""

    prefix: str
    weight: float  # in the blend, not normalised
    share: float  # of the samples; its weight divided by the sum of all
    documents: int
    tokens: int
    samples_wanted: int
    epochs: float  # how often the samples wanted read the documents
    size_for: Callable[[int], int] = field(compare=False)  # samples there, by samples wanted


@dataclass(frozen=True)
class Datasets:
    """Training, validation and test datasets of a run; the latter two by name."""

    train: TracedSource
    valid: dict[str, TracedSource]
    test: dict[str, TracedSource]
    uses: dict[tuple[str, str], list[CorpusUse]]
    """Uses of each corpus, by role ("train", "valid", "test") and name."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Request for an objective's custom datasets: see `Objective.datasets`."""

    data: DataPlan
    model: ModelSpec
    objective: ObjectivePlan
    batch: BatchPlan
    seed: int
    trains: bool  # False: the run only evaluates
