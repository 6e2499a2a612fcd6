"""The interface of a training objective: datasets, batch fields, layers, loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.config.architecture.architecture import network_of
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.data.datasets.run_datasets import DataRequest, Datasets
from megatron.model.layers.layer_list import Step
from megatron.model.layers.parts import LayerParts
from megatron.model.loss import Loss, next_token_loss
from megatron.tensor_parallel.broadcast import Batch, Fields
from megatron.tokenizer.types.tokenizer import Tokenizer

Collate = Callable[..., Batch]
"""Makes a batch of the fields of several samples, given by name with a dimension of b in front."""


class Objective(ABC):
    """A training objective. A subclass is a file here, registered in OBJECTIVES.

    What has to be known without torch (entry script, kind of token files, flags, view of samples) is
    its `Declaration`, in `config/data/objective.py` or with a plugin's `register(…, about=…)`.
    """

    name: ObjectiveName
    token_fields: tuple[str, ...] = ("tokens",)  # of a sample, whose ids the vocabulary must hold
    fields: Fields  # of a batch, if its masks do not decide them

    def datasets(self, request: DataRequest, tokenizer: Tokenizer) -> Datasets | None:
        """Return the data sets of this objective; None if samples are cut from token files.

        Raises:
            DataError: a file is missing or malformed.
        """
        return None

    def initial_weights(self, plan: ObjectivePlan) -> str:
        """Return the directory of a checkpoint whose weights alone a new run begins with; "": none."""
        return ""

    def epochs(
        self, run: Any, *, sets: Datasets, batches: Callable[..., Iterator[Batch]]
    ) -> Any | None:
        """Return the hook after each epoch, a `megatron.training.loop.epochs.EpochHook`, or None.

        Args:
            run: a `megatron.training.run.Run`.
            sets: its data sets.
            batches: yields this replica's micro-batches of a data set, from a sample on.
        """
        return None

    def batch_fields(self, masks: MaskPlan) -> Fields:
        """Return the fields of a batch, with their shapes and dtypes."""
        return self.fields

    def letters(self, spec: ModelSpec) -> Mapping[str, int]:
        """Return the sizes of letters in the shapes of `batch_fields`, besides b, s and S."""
        return {}

    @abstractmethod
    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return a function that makes a batch of samples.

        Args:
            eod: the token that ends a document; None if `masks` do not need it.
        """

    def layers(self, spec: ModelSpec, parts: LayerParts) -> list[Step]:
        """Return the layers of `spec`, not built yet."""
        return network_of(spec).layers(spec, parts)

    def loss_terms(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return the names of the terms that the loss returns in addition to its total: see `Losses`.

        These are also the objective's metrics: evaluations log and record their means.
        """
        return tuple(name for part in spec.parts for name in part.loss_terms)

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the function that builds the loss (default: next-token loss)."""
        return next_token_loss
