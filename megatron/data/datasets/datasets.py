"""Datasets of a run (training, validation, test), built from its plan."""

import logging
import sys
from collections.abc import Iterator

import numpy as np

from megatron.common.errors import ConfigError, DataError
from megatron.common.registry import DATASETS, KINDS, import_dotted
from megatron.config.data.corpora import DataPlan, DatasetPlan, SourcePlan, suffixes_of
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.config.objectives import declaration_of
from megatron.data.datasets.kinds import Kind
from megatron.data.datasets.run_datasets import CorpusUse, Datasets, RoleView, View
from megatron.data.sampling.batch_sampler import Sample
from megatron.data.sampling.blending import BlendedDataset, samples_wanted, shares_of
from megatron.data.sampling.provenance import Origin, TracedSource
from megatron.data.sampling.splits import document_range, split_ranges
from megatron.data.token_files.indexed_dataset import IndexedDataset, open_token_files
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_ROLES = ("train", "valid", "test")


def build_datasets(
    plan: DataPlan, *, seq_length: int, seed: int, view: View | RoleView | None = None
) -> Datasets:
    """Return the data sets of `plan`; their index maps come from the cache or are put there.

    A corpus that has no document in its range, or for validation or test less than one sample, is
    left out of a blend, which keeps the other corpora's proportions; a validation or test set of
    such corpora alone is left out. With --sample-order megatron-core, documents of less than one
    sample are repeated for validation and test instead, as Megatron-LM does.

    Args:
        view: put over each data set; default: none.

    Raises:
        ConfigError: the samples of the run are random tokens.
        DataError: files are missing or damaged, have less than one sample in a range for training
            that is not empty, or hold nothing to train on.
    """
    if plan.is_random:
        raise ConfigError(
            "the samples of this run are random tokens (--mock-data): there are no documents to read"
        )
    builder = _Builder(plan, seq_length=seq_length, seed=seed, view=view)
    train = builder.build(plan.train, "train")
    if train is None:
        where = f"--split {plan.split}" if plan.split else "START:END"
        raise DataError(
            f"{where} leaves no document of "
            f"{', '.join(source.prefix for source in plan.train.sources)} for training"
        )
    return Datasets(
        train,
        dict(builder.build_all(plan.valid, "valid")),
        dict(builder.build_all(plan.test, "test")),
        builder.uses,
    )


class _Builder:
    """Opens each pair of token files once."""

    def __init__(self, plan: DataPlan, *, seq_length: int, seed: int, view: View | RoleView | None):
        self._plan = plan
        self._kind: Kind = KINDS.get(plan.kind)()
        self._seq_length = seq_length
        self._seed = seed
        self._view = view
        self._cache_directory = plan.cache_path or None
        self._opened: dict[str, IndexedDataset] = {}
        self.uses: dict[tuple[str, str], list[CorpusUse]] = {}

    def build_all(
        self, plans: tuple[DatasetPlan, ...], role: str
    ) -> Iterator[tuple[str, TracedSource]]:
        """Yield name and data set of those that have a sample."""
        for plan in plans:
            dataset = self.build(plan, role)
            if dataset is not None:
                yield plan.name, dataset

    def build(self, plan: DatasetPlan, role: str) -> TracedSource | None:
        """Return one data set; None if none of its sources has a sample."""
        sources = []
        for source in plan.sources:
            documents = self._documents(source, role)
            lack = self._lack(source, documents, role, plan)
            if source.weight and not lack:
                sources.append((source, documents))
            elif source.weight and len(plan.sources) > 1:
                log.warning(
                    "%s has %s for %s: it is left out of the blend of %s",
                    *(source.prefix, lack, role, plan.name),
                )
        if not sources:
            if role != "train":
                reason = lack if len(plan.sources) == 1 else "no corpus with a sample"
                log.info("%s set %s has %s: it is left out", role, plan.name, reason)
            return None
        dataset = self._read(plan, sources, role)
        if self._plan.order == "cyclic":
            dataset = CyclicDataset(dataset, seed=self._seed)
        # Over the order, so that a sample that comes again is drawn anew.
        view = self._view
        if isinstance(view, RoleView):
            view = view.of(role, plan.num_samples)
        return view(dataset) if view else dataset

    def _read(
        self, plan: DatasetPlan, sources: list[tuple[SourcePlan, range]], role: str
    ) -> TracedSource:
        weights = [source.weight for source, _ in sources]
        order = self._plan.sample_order
        wanted = [plan.num_samples]
        if plan.is_blend:
            surplus = self._plan.blend_surplus
            wanted = samples_wanted(weights, plan.num_samples, order, surplus)
        is_validation = self._is_validation(role, plan)
        cut, rules = self._kind.dataset, self._kind.rules(self._plan, is_validation=is_validation)
        if self._plan.dataset:
            cut = DATASETS.get(self._plan.dataset, self._plan.own_flags)
        parts = [
            cut(
                *self._open_all(source),
                documents,
                num_samples=num_samples,
                seq_length=self._seq_length,
                seed=self._seed,
                cache_directory=self._cache_directory,
                **rules,
            )
            for (source, documents), num_samples in zip(sources, wanted, strict=True)
        ]
        self.uses[role, plan.name] = [
            CorpusUse(
                source.prefix,
                source.weight,
                share,
                len(documents),
                part.num_tokens,
                count,
                part.epochs(count),
                part.size_for,
            )
            for (source, documents), share, part, count in zip(
                sources, shares_of(weights, order), parts, wanted, strict=True
            )
        ]
        if not plan.is_blend:
            return parts[0]
        return BlendedDataset(
            parts,
            weights,
            num_samples=plan.num_samples,
            num_needed=wanted,
            prefix=sources[0][0].prefix,
            cache_directory=self._cache_directory,
            sample_order=order,
        )

    def _documents(self, source: SourcePlan, role: str) -> range:
        dataset = self._open_all(source)[0]
        size = len(dataset)
        if self._plan.kind == "sentences":
            size = len(dataset.document_starts) - 1
        if not size:
            raise DataError(
                f"{source.prefix} has no documents: 0 tokens, one sample needs "
                f"{self._seq_length + 1}"
            )
        if self._plan.split:
            ranges = split_ranges(self._plan.split, size, self._plan.sample_order)
            return ranges[_ROLES.index(role)]
        return document_range(source.start, source.end, size)

    @staticmethod
    def _is_validation(role: str, plan: DatasetPlan) -> bool:
        """Whether a set is read for validation or test, and not left empty."""
        return role != "train" and plan.num_samples > 0

    def _lack(self, source: SourcePlan, documents: range, role: str, plan: DatasetPlan) -> str:
        """Return why a corpus gives no sample, or an empty text; of training, that is an error."""
        if not documents:
            return "no documents"
        if role == "train":
            return ""
        return self._kind.lack(
            self._open_all(source)[0],
            documents,
            self._plan,
            seq_length=self._seq_length,
            is_validation=self._is_validation(role, plan),
        )

    def _open_all(self, source: SourcePlan) -> list[IndexedDataset]:
        return [self._open(source.prefix + suffix) for suffix in suffixes_of(self._plan.kind)]

    def _open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            self._opened[prefix] = open_token_files(prefix, self._plan.impl)
        return self._opened[prefix]


class CyclicDataset:
    """The endless sequence of permutations of a data set, one after the other.

    Position p is sample `permutation[p % n]` of the permutation number `p // n`, n being the
    samples of the data set: a function of the samples consumed, whatever the layout.

    Randomness: permutation e is numpy.random.RandomState([seed, e]).permutation(n).
    """

    def __init__(self, dataset: TracedSource, *, seed: int):
        self.dataset = dataset
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> Sample:
        return self.dataset[self._sample(position)]

    def origin(self, position: int) -> Origin:
        """Return the token spans of a position on disk."""
        return self.dataset.origin(self._sample(position))

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            rng = np.random.RandomState([self._seed % 2**32, epoch])
            self._permutation, self._epoch = rng.permutation(len(self.dataset)), epoch
        return int(self._permutation[index])


def view_of(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | RoleView | None:
    """Return the view by which `objective` wraps a dataset; None when it takes plain samples.

    Raises:
        DataError: the tokenizer lacks a special token that is needed.
    """
    name = declaration_of(objective.name).view
    if not name:
        return None
    view: View | RoleView | None = import_dotted(name)(objective, masks, tokenizer, seed)
    return view
