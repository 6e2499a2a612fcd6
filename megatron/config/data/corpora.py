"""Training, validation and test data: flags, blends and splits, and checks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.registry import KINDS, OwnFlags
from megatron.config.data.split_paths import (
    SplitGroup,
    SplitPart,
    parse_split_group,
    read_split_groups,
)
from megatron.config.parsing.declaration import setting

SampleOrder = Literal["bigscience", "megatron-core"]
"""Programs whose sample order a run can have."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training, validation and test data."""

    data_path: list[str] | None = None
    """Prefix of a .bin/.idx pair made by tools/preprocess_data.py, or alternating weights and
    prefixes to blend datasets: 0.3 first 0.7 second."""

    mock_data: bool = setting(False, plan="data.is_random")
    """Train on random tokens instead of token files, the same ones with the same --seed: for tests of
    throughput and layouts (pretrain_gpt.py)."""

    split: str | None = None
    """Proportions of the documents of --data-path for training, validation and test (default: 969,
    30, 1)."""

    train_weighted_split_paths: list[str] | None = None
    """Training data instead of --data-path, one word: 'NAME: WEIGHT START:END PREFIX, ...', where
    START and END are fractions of the documents."""

    valid_weighted_split_paths: list[str] | None = None
    """Validation data in the same format; each group is evaluated separately, under its NAME."""

    test_weighted_split_paths: list[str] | None = None
    """Test data in the same format; each group is evaluated separately, under its NAME."""

    train_weighted_split_paths_path: str | None = None
    """File with the value of --train-weighted-split-paths, in double quotes."""

    valid_weighted_split_paths_path: str | None = None
    """File with the values of --valid-weighted-split-paths, each in double quotes."""

    test_weighted_split_paths_path: str | None = None
    """File with the values of --test-weighted-split-paths, each in double quotes."""

    dataloader_type: Literal["single", "cyclic"] = "single"
    """Order of the samples: single reads them once, cyclic repeats them, in a new permutation each
    time."""

    sample_order: SampleOrder = "bigscience"
    """Rules that cut --split, shuffle the last epoch and size the parts of a blend: as in
    BigScience's Megatron-DeepSpeed, or as in current Megatron-LM (megatron-core)."""

    mid_level_dataset_surplus: float = setting(0.005, plan="data.blend_surplus")
    """Share of its samples that is built in addition for each corpus of a blend; another value than
    the default needs --sample-order megatron-core."""

    data_impl: Literal["lazy", "cached", "mmap", "infer"] = "infer"
    """Format of the token files; infer looks at each."""

    data_cache_path: str | None = None
    """Directory for the index maps (default: next to the token files)."""


DEFAULT_SPLIT = "969, 30, 1"

KINDS.declare("documents", "megatron.data.datasets.gpt_dataset", ("",))
_PACKED = "megatron.data.datasets.packed_dataset"
KINDS.declare("pairs", _PACKED, ("_inputs_document", "_targets_document"))
KINDS.declare("conversations", _PACKED, ("_tokens_document", "_loss_mask_document"))


def suffixes_of(kind: str) -> tuple[str, ...]:
    """Return the suffixes of a kind's token files, after the prefix; () for no token files."""
    suffixes: tuple[str, ...] = KINDS.about(kind)
    return suffixes


@dataclass(frozen=True, kw_only=True)
class SourcePlan:
    """A part of one corpus, and its weight in a blend."""

    prefix: str
    weight: float  # not normalised
    start: float  # fractions of the documents, before `DataPlan.split`
    end: float


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """A blend that is read as one data set, evaluated under its name."""

    name: str
    num_samples: int
    sources: tuple[SourcePlan, ...]
    is_blend: bool  # whether samples are dealt out by weight, even if there is one source


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The data sets of a run."""

    train: DatasetPlan
    valid: tuple[DatasetPlan, ...]  # each evaluated separately
    test: tuple[DatasetPlan, ...]
    split: str  # proportions that cut each source into train, valid and test; "": not cut
    impl: str  # format of the token files, or "infer"
    kind: str  # what samples are cut from; see `suffixes_of`
    order: str  # "single" or "cyclic"
    sample_order: SampleOrder  # whose rules of splits, last epochs and blends
    blend_surplus: float  # share of its samples built in addition for each corpus of a blend
    cache_path: str  # "": next to the token files
    dataset: str = ""  # of a plugin, that cuts documents into samples; "": GPT's
    own_flags: OwnFlags = ()  # of that dataset
    cut: Any = None  # how documents are cut into samples; see `Declaration.cut`
    is_random: bool = False  # samples are random tokens, without files
    chat_template: str = ""  # Jinja that wrote the conversations, as the token files record it

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of all token files that the run reads, each once."""
        sets = (self.train, *self.valid, *self.test)
        prefixes = {source.prefix for each in sets for source in each.sources}
        return [prefix + suffix for prefix in sorted(prefixes) for suffix in suffixes_of(self.kind)]


def plan_data(
    data: DataConfig,
    *,
    train_samples: int,
    evaluation_samples: int,
    evaluations: int,
    kind: str = "documents",
    cut: Any = None,
) -> DataPlan:
    """Return the decided data, once `data_problems` finds nothing.

    Every validation set gets its share for every evaluation during and after training, every test
    set for one.

    Args:
        train_samples: samples that the run trains on.
        evaluation_samples: samples of one evaluation of a set.
        evaluations: how often validation sets are evaluated.
        kind: what samples are cut from; see `suffixes_of`.
        cut: how documents are cut, if the kind needs it.
    """
    groups = _groups(data)
    groups["train"] = groups["train"] or [SplitGroup("train", ())]
    weighted = len(data.data_path or []) > 1
    (train,) = _datasets(groups["train"], train_samples, weighted)
    return DataPlan(
        train=train,
        valid=_datasets(groups["valid"], evaluations * evaluation_samples, weighted),
        test=_datasets(groups["test"], evaluation_samples, weighted),
        split=(data.split or DEFAULT_SPLIT) if data.data_path else "",
        impl=data.data_impl,
        kind=kind,
        order=data.dataloader_type,
        sample_order=data.sample_order,
        blend_surplus=data.mid_level_dataset_surplus,
        cache_path=data.data_cache_path or "",
        cut=cut,
        is_random=data.mock_data,
    )


def data_problems(data: DataConfig) -> Iterator[str]:
    """Yield every reason why the flags do not name token files."""
    yield from surplus_problems(data)
    weighted = [_flag(paths) + ("" if paths.texts else "-path") for paths in _weighted_paths(data)]
    if data.mock_data:
        given = ["--data-path"] * bool(data.data_path) + weighted
        yield from (f"--mock-data reads no files: leave {flag} out" for flag in given)
        return
    if data.data_path and weighted:
        yield f"--data-path and {weighted[0]} both name the data: give one of them"
        return
    if data.split and weighted:
        yield f"--split is for --data-path; {weighted[0]} has START:END for each PREFIX"
    if not data.data_path and not weighted:
        yield (
            "--data-path is missing: the prefix of a .bin/.idx pair of tools/preprocess_data.py, "
            "or alternating weights and prefixes"
        )
        return
    try:
        groups = _groups(data)
    except ConfigError as error:
        yield from error.problems
        return
    if len(groups["train"]) != 1:
        yield f"--train-weighted-split-paths takes one group, {len(groups['train'])} were given"
    for role in ("valid", "test"):
        names = [group.name for group in groups[role]]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"--{role}-weighted-split-paths has {names.count(name)} groups named {name}"


def prefixes_of(data: DataConfig, kind: str) -> list[str]:
    """Return the prefixes of all token files that a run is to read, each once.

    Raises:
        ConfigError: it is not clear which.
    """
    groups = (group for of_role in _groups(data).values() for group in of_role)
    prefixes = {part.prefix for group in groups for part in group.parts}
    return [prefix + suffix for prefix in sorted(prefixes) for suffix in suffixes_of(kind)]


def token_file_flags(data: DataConfig) -> list[str]:
    """Return the flags that name token files."""
    return ["--data-path"] * bool(data.data_path) + [*map(_flag, _weighted_paths(data))]


def surplus_problems(data: DataConfig) -> Iterator[str]:
    """Yield problems of --mid-level-dataset-surplus."""
    surplus = data.mid_level_dataset_surplus
    flag = f"--mid-level-dataset-surplus {surplus}"
    if not 0 < surplus < math.inf:
        yield f"{flag} must be more than 0: an order by weights takes up to one sample more"
    elif surplus != DataConfig.mid_level_dataset_surplus and data.sample_order == "bigscience":
        yield f"{flag} needs --sample-order megatron-core: the other order has a fixed surplus"


def with_some_data(data: DataConfig) -> DataConfig:
    """Return `data`, with a meaningless prefix where it names no data: to plan, not to train."""
    if data.data_path or data.mock_data or _weighted_paths(data):
        return data
    return replace(data, data_path=["none"])


@dataclass(frozen=True)
class _WeightedPaths:
    """The weighted paths of one role: train, valid or test."""

    role: str
    texts: list[str] | None
    file: str | None


def _weighted_paths(data: DataConfig) -> list[_WeightedPaths]:
    """Return the weighted paths that are given, by role."""
    given = [
        _WeightedPaths(
            "train", data.train_weighted_split_paths, data.train_weighted_split_paths_path
        ),
        _WeightedPaths(
            "valid", data.valid_weighted_split_paths, data.valid_weighted_split_paths_path
        ),
        _WeightedPaths("test", data.test_weighted_split_paths, data.test_weighted_split_paths_path),
    ]
    return [paths for paths in given if paths.texts or paths.file]


def _flag(paths: _WeightedPaths) -> str:
    return f"--{paths.role}-weighted-split-paths"


def _groups(data: DataConfig) -> dict[str, list[SplitGroup]]:
    """Return the groups for training, validation and test.

    Raises:
        ConfigError: the texts are not of their grammar.
    """
    if data.data_path or data.mock_data:
        blend = _blend(data.data_path) if data.data_path else ()
        return {role: [SplitGroup(role, blend)] for role in ("train", "valid", "test")}
    groups: dict[str, list[SplitGroup]] = {"train": [], "valid": [], "test": []}
    problems: list[str] = []
    for paths in _weighted_paths(data):
        try:
            for text in _texts(paths):
                groups[paths.role].append(parse_split_group(text, _flag(paths)))
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)
    return groups


def _texts(paths: _WeightedPaths) -> list[str]:
    flag = _flag(paths)
    if paths.texts and paths.file:
        raise ConfigError(f"{flag} and {flag}-path set the same: give one of them")
    return read_split_groups(paths.file, f"{flag}-path") if paths.file else paths.texts or []


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _blend(words: list[str]) -> tuple[SplitPart, ...]:
    """Return the sources of `--data-path`: one prefix, or alternating weights and prefixes."""
    if len(words) == 1:
        return (SplitPart(1.0, 0.0, 1.0, words[0]),)
    if not any(map(_is_number, words)):
        raise ConfigError(
            f"--data-path {' '.join(words)}: several prefixes need a weight before each, such as "
            f"{' '.join(f'{1 / len(words):.2g} {word}' for word in words)}; for as much of each as "
            f"it holds, merge them: tools/merge_preprocessed_data.py --datasets {' '.join(words)} "
            "--output-prefix NEW"
        )
    if len(words) % 2:
        raise ConfigError(
            f"--data-path has {len(words)} values; give one prefix, or weights and prefixes by "
            "turns: 0.3 first 0.7 second"
        )
    problems = []
    weights = []
    for word, prefix in zip(words[::2], words[1::2], strict=True):
        try:
            weights.append(float(word))
        except ValueError:
            problems.append(
                f"--data-path: {word!r} before {prefix} is not a number, so it is no weight"
            )
            continue
        if not 0 <= weights[-1] < math.inf:
            problems.append(f"--data-path: weight {word} of {prefix} must be 0 or more")
    if not problems and not sum(weights) > 0:
        problems.append("--data-path: the weights are all 0")
    raise_if_any(problems)
    return tuple(
        SplitPart(weight, 0.0, 1.0, prefix)
        for weight, prefix in zip(weights, words[1::2], strict=True)
    )


def _datasets(
    groups: list[SplitGroup], num_samples: int, weighted: bool
) -> tuple[DatasetPlan, ...]:
    """Return the data sets of the groups; none for 0 samples."""
    return tuple(
        DatasetPlan(
            name=group.name,
            num_samples=num_samples,
            sources=tuple(SourcePlan(**vars(part)) for part in group.parts),
            is_blend=weighted or len(group.parts) > 1,
        )
        for group in groups
        if num_samples
    )
