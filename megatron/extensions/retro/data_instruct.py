"""Samples of instruction tuning: a prompt with its answer, and the contexts that a Retro encodes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import WrongDataError
from megatron.config.architecture.architecture import network_of
from megatron.config.data.corpora import DataPlan, DatasetPlan
from megatron.data.datasets.datasets import CyclicDataset
from megatron.data.datasets.run_datasets import CorpusUse, DataRequest, Datasets
from megatron.data.sampling.blending import BlendedDataset, samples_wanted, shares_of
from megatron.data.sampling.provenance import Origin, TracedSource
from megatron.extensions.retro.data_questions import (
    Prompts,
    QAItem,
    encoder_contexts,
    read_qa_items,
)
from megatron.extensions.retro.flags import RetroSpec
from megatron.extensions.retro.instruct_flags import InstructPlan
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class InstructDataset:
    """Samples of one file of questions: prompt, answer, EOD and padding.

    Contexts in a prompt are cut so that its answer fits; a sample too long without them is cut at
    the end. A Retro also gets contexts for its encoder.

    Args:
        items: each has an answer; its first one counts.
        neighbors: how many contexts the encoder gets, and tokens of each; None without a Retro.

    Shapes: dataset[i] -> {"tokens", "is_target": [s + 1]} int64; of a Retro also "prompt_lengths": [],
        "neighbor_tokens": [1, k, r], "neighbor_lengths": [1, k].
    """

    def __init__(
        self,
        items: Sequence[QAItem],
        *,
        file: Path,
        prompts: Prompts,
        plan: InstructPlan,
        seq_length: int,
        neighbors: tuple[int, int] | None,
    ):
        self.items, self.file = items, file
        self._prompts, self._plan = prompts, plan
        self._seq_length, self._neighbors = seq_length, neighbors

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        item, tokenizer, s = self.items[i], self._prompts.tokenizer, self._seq_length
        answer = [*tokenizer.encode(f" {item.answers[0]}"), tokenizer.eod]
        prompt = self._prompts.tokens(item, s + 1 - len(answer))
        text = [*prompt, *answer][: s + 1]
        tokens = np.full(s + 1, tokenizer.eod, np.int64)
        tokens[: len(text)] = text
        is_target = np.zeros(s + 1, np.int64)
        is_target[len(prompt) if self._plan.answers_only else 0 : len(text)] = 1
        sample = {"tokens": tokens, "is_target": is_target}
        if self._neighbors is None:
            return sample
        return sample | self._retrieve(item) | {"prompt_lengths": np.array(min(len(prompt), s))}

    def origin(self, i: int) -> Origin:
        """Return the file of sample i, and its number there among the questions with an answer."""
        return Origin(str(self.file), i, ())

    def _retrieve(self, item: QAItem) -> dict[str, NDArray]:
        """Return the contexts for the encoder."""
        count, length = self._neighbors or (0, 0)
        found = encoder_contexts(
            item,
            self._prompts.tokenizer,
            first=0 if self._plan.reuses_top else self._plan.num_contexts,
            count=count,
            length=length,
        )
        tokens = np.full((1, count, length), self._prompts.tokenizer.eod, np.int64)
        for row, context in zip(tokens[0], found, strict=True):
            row[: len(context)] = context
        lengths = np.array([[len(context) for context in found]], np.int64)
        return {"neighbor_tokens": tokens, "neighbor_lengths": lengths}


def instruct_datasets(request: DataRequest, tokenizer: Tokenizer) -> Datasets:
    """Return the blends of the files NAME_QA_train.json and NAME_QA_dev.json of --data-path.

    Each file is read in endless shuffled epochs. Validation leaves names without a file out.

    Raises:
        WrongDataError: a file is missing or malformed, or has no question with an answer.
    """
    retrieves = network_of(request.model).retrieves
    retro = request.model.part(RetroSpec)
    sizes = retro.retro_num_neighbors, retro.retro_retrieved_length
    sections: InstructPlan = request.objective.own

    def read(name: str, file: Path) -> InstructDataset:
        items = read_qa_items(
            file, is_retrieved=sections.is_retrieved, is_longform=sections.is_longform
        )
        prompts = Prompts(
            tokenizer=tokenizer, name=name, num_contexts=sections.num_contexts, retrieves=retrieves
        )
        return InstructDataset(
            items,
            file=file,
            prompts=prompts,
            plan=sections,
            seq_length=request.model.seq_length,
            neighbors=sizes if retrieves else None,
        )

    build = partial(_blend, request.data, sections.folder, read, seed=request.seed)
    train, uses = build(request.data.train, "train")
    if train is None:
        raise WrongDataError(
            f"--data-path names no file of questions in --data-folder {sections.folder}"
        )
    valid = {each.name: build(each, "dev")[0] for each in request.data.valid}
    return Datasets(
        train,
        {name: dataset for name, dataset in valid.items() if dataset is not None},
        {},
        {("train", request.data.train.name): uses},
    )


def _blend(
    data: DataPlan,
    folder: str,
    read: Callable[[str, Path], InstructDataset],
    plan: DatasetPlan,
    part: str,
    *,
    seed: int,
) -> tuple[TracedSource | None, list[CorpusUse]]:
    """Return one data set and its files; None if there are none to evaluate on."""
    named = [*_files(plan, folder, part)]
    if not named:
        return None, []
    files = [read(name, file) for name, file, _ in named]
    weights = [weight for _, _, weight in named]
    wanted = [plan.num_samples]
    if plan.is_blend:
        wanted = samples_wanted(weights, plan.num_samples, data.sample_order, data.blend_surplus)
    uses = [
        CorpusUse(
            str(each.file), weight, share, len(each), 0, count, count / len(each), lambda _: 0
        )
        for each, weight, share, count in zip(
            files, weights, shares_of(weights, data.sample_order), wanted, strict=True
        )
    ]
    sources = [CyclicDataset(each, seed=seed) for each in files]
    if not plan.is_blend:
        return sources[0], uses
    dataset: TracedSource = BlendedDataset(
        sources,
        weights,
        num_samples=plan.num_samples,
        num_needed=wanted,
        prefix=str(files[0].file),
        cache_directory=data.cache_path or None,
        sample_order=data.sample_order,
    )
    return CyclicDataset(dataset, seed=seed) if data.order == "cyclic" else dataset, uses


def _files(plan: DatasetPlan, folder: str, part: str) -> Iterator[tuple[str, Path, float]]:
    """Yield name, file and weight of each source."""
    for source in plan.sources:
        file = Path(folder) / source.prefix / f"{source.prefix}_QA_{part}.json"
        if part != "train" and not file.exists():
            log.warning("%s is missing: %s is not evaluated", file, source.prefix)
        elif source.weight:
            yield source.prefix, file, source.weight
