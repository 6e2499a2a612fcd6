"""Kinds of token files: how samples are cut from each."""

from collections.abc import Callable
from typing import Any

from megatron.config.data.corpora import DataPlan
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
