"""Kinds of token files: how samples are cut from each."""

from collections.abc import Callable
from typing import Any

from megatron.common.registry import KINDS
from megatron.config.data.corpora import DataPlan
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.datasets.packed_dataset import ChatDataset, MTFDataset
from megatron.data.sampling.index_cache import cached_sizes
from megatron.data.token_files.indexed_dataset import IndexedDataset


class Kind:
    """How samples are cut from token files of one kind.

    A subclass is registered in KINDS under its name, with the suffixes of its files.
    """

    dataset: Callable[..., Any]  # called with the token files of a prefix; see `GPTDataset`
    repeats_documents = False  # in epochs, whose number decides the order

    def rules(self, plan: DataPlan, *, is_validation: bool) -> dict[str, Any]:
        """Return further arguments of `dataset`.

        Args:
            is_validation: whether the set is one for validation or test.
        """
        return {}

    def lack(
        self,
        tokens: IndexedDataset,
        documents: range,
        plan: DataPlan,
        *,
        seq_length: int,
        is_validation: bool,
    ) -> str:
        """Return why documents give no sample for validation or test; "" if they do."""
        return ""


@KINDS.register("documents")
class Documents(Kind):
    """Documents that are packed one after the other and cut."""

    dataset = GPTDataset
    repeats_documents = True

    def rules(self, plan: DataPlan, *, is_validation: bool) -> dict[str, Any]:
        """Return the program whose order samples have, and whether short corpora repeat."""
        repeats = {"repeats_short": True} if _repeats_short(plan, is_validation) else {}
        return {"sample_order": plan.sample_order, **repeats}

    def lack(
        self,
        tokens: IndexedDataset,
        documents: range,
        plan: DataPlan,
        *,
        seq_length: int,
        is_validation: bool,
    ) -> str:
        """Return how many tokens there are, if these are too few for a sample."""
        sizes = cached_sizes(tokens, documents, directory=plan.cache_path or None)
        if sizes.num_tokens > (0 if _repeats_short(plan, is_validation) else seq_length):
            return ""
        return f"{sizes.num_tokens} tokens of the {seq_length + 1} of one sample"


def _repeats_short(plan: DataPlan, is_validation: bool) -> bool:
    """Whether documents of less than one sample repeat; a plugin's datasets decide otherwise."""
    return is_validation and plan.sample_order == "megatron-core" and not plan.dataset


@KINDS.register("pairs")
class Pairs(Kind):
    """Inputs and targets. Uncut texts are packed in turn: no epoch of theirs is shuffled by itself."""

    dataset = MTFDataset


@KINDS.register("conversations")
class Conversations(Kind):
    """Conversations with the mask of their loss, packed as `Pairs` are."""

    dataset = ChatDataset
