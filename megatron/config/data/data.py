"""Which tokens the model is trained on."""

from dataclasses import dataclass
from typing import Literal

SampleOrder = Literal["bigscience", "megatron-core"]
"""Programs whose sample order a run can have."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data, as the user asked for it."""

    data_path: list[str] | None = None
    """Prefix of a .bin/.idx pair made by tools/preprocess_data.py, or weights and prefixes by turns
    to blend several: 0.3 first 0.7 second."""

    split: str | None = None
    """Proportions of the documents of --data-path for training, validation and test (default: 969,
    30, 1)."""

    train_weighted_split_paths: list[str] | None = None
    """Training data instead of --data-path, one word: 'NAME: WEIGHT START:END PREFIX, ...', where
    START and END are fractions of the documents."""

    valid_weighted_split_paths: list[str] | None = None
    """Validation data of the same form; each of several is evaluated apart, under its NAME."""

    test_weighted_split_paths: list[str] | None = None
    """Test data of the same form; each of several is evaluated apart, under its NAME."""

    train_weighted_split_paths_path: str | None = None
    """File with the value of --train-weighted-split-paths, in double quotes."""

    valid_weighted_split_paths_path: str | None = None
    """File with the values of --valid-weighted-split-paths, each in double quotes."""

    test_weighted_split_paths_path: str | None = None
    """File with the values of --test-weighted-split-paths, each in double quotes."""

    dataloader_type: Literal["single", "cyclic"] = "single"
    """Order of the samples: single goes through them once, cyclic through a new permutation of them
    as often as is needed."""

    sample_order: SampleOrder = "bigscience"
    """Rules that cut --split, shuffle the last epoch and size the parts of a blend: those of
    BigScience's Megatron-DeepSpeed, or those of current Megatron-LM (megatron-core)."""

    mid_level_dataset_surplus: float = 0.005
    """Share of its samples that is built in addition for each corpus of a blend; another value than
    the default needs --sample-order megatron-core."""

    data_impl: Literal["lazy", "cached", "mmap", "infer"] = "infer"
    """Format of the token files; infer looks at each."""

    data_cache_path: str | None = None
    """Directory for the index maps (default: beside the token files)."""
