"""Training and validation sets of a downstream task, from its labelled files."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from megatron.common.errors import WrongDataError
from megatron.config.architecture.architecture import network_of
from megatron.data.datasets.epoch_order import ShuffledEpochs
from megatron.data.datasets.run_datasets import DataRequest, Datasets
from megatron.data.sampling.batch_sampler import Sample, SampleSource
from megatron.data.sampling.epoch_plan import EpochPlan
from megatron.extensions.tasks.data.task import LabelledData, Task
from megatron.extensions.tasks.data.tasks import task_of
from megatron.extensions.tasks.flags import DownstreamPlan
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True)
class LabelledDatasets(Datasets):
    """Data sets of a task, and its validation files by name, each evaluated by itself."""

    task: Task
    steps: int  # optimizer steps of an epoch
    files: Mapping[str, LabelledData]


def task_datasets(request: DataRequest, tokenizer: Tokenizer) -> LabelledDatasets:
    """Return the shuffled epochs of --train-data, and of all files of --valid-data together.

    A run that only evaluates reads no training data.

    Raises:
        WrongDataError: a file is missing or malformed, or two have the same name.
    """
    downstream: DownstreamPlan = request.objective.own
    task = task_of(downstream.task, downstream.text, causal=network_of(request.model).is_causal)
    read = partial(task.data, tokenizer=tokenizer, seq_length=request.model.seq_length)
    files = [read([Path(path)], trains=False) for path in downstream.valid_data]
    names = [file.name for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WrongDataError(
            f"--valid-data {' '.join(downstream.valid_data)}: several of them are named {twice[0]}; "
            "give each another file or folder name"
        )
    labelled = [file for file in files if file.has_labels]
    valid = (
        {"valid": shuffled_epochs(Joined(labelled), request, keeps_last=True)} if labelled else {}
    )
    if request.trains:
        source = read([Path(path) for path in downstream.train_data], trains=True)
        train = shuffled_epochs(source, request, keeps_last=downstream.keeps_last)
    else:
        train = shuffled_epochs(Joined(files), request, keeps_last=True)
    return LabelledDatasets(
        train,
        {**valid},
        {},
        {("train", request.data.train.name): []},
        task=task,
        steps=train.plan.steps,
        files=dict(zip(names, files, strict=True)),
    )


def shuffled_epochs(
    source: SampleSource, request: DataRequest, *, keeps_last: bool
) -> ShuffledEpochs:
    """Return the shuffled epochs of `source` in the batches of a run."""
    epochs = EpochPlan(
        samples=len(source),
        micro_batch_size=request.batch.micro_batch_size,
        replicas=request.batch.data_parallel_size,
        global_batch_size=request.batch.global_batch_size,
        keeps_last=keeps_last,
    )
    return ShuffledEpochs(source, epochs, seed=request.seed)


class Joined:
    """Several finite data sets, one after the other."""

    def __init__(self, sources: Sequence[SampleSource]):
        self._sources = sources
        self._ends = [*accumulate(map(len, sources))]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Sample:
        number = bisect_right(self._ends, i)
        first = self._ends[number - 1] if number else 0
        return self._sources[number][i - first]
