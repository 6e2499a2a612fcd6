"""Which tokens the model is trained on."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data, as the user asked for it."""

    data_path: list[str] | None = None
    """Prefix of a .bin/.idx pair made by tools/preprocess_data.py."""

    split: str = "969, 30, 1"
    """Proportions of documents for training, validation and test."""

    data_impl: Literal["mmap", "infer"] = "infer"
    """Format of the token files."""

    data_cache_path: str | None = None
    """Directory for the index maps; beside the token files when not said."""
