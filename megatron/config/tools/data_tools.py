"""Flags of the tools that inspect data, in addition to training's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SampleTextConfig:
    """The training samples to show."""

    sample_id_range: list[int]
    """First sample, and the one after the last."""

    print_text: bool = False
    """Show the text (default: on without --print-tokens)."""

    print_tokens: bool = False
    """Show token ids."""

    all_tokens: bool = False
    """Show all token ids of a sample instead of the first and the last few."""

    output_file: str | None = None
    """File to write to instead of the terminal."""


@dataclass(frozen=True, kw_only=True)
class StepSamplesConfig:
    """The training steps to trace."""

    steps: list[int]
    """Number of a step, or of the first and the last; a run begins with step 1."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """The token files to inspect."""

    prefix: str
    """Path of the .bin/.idx pair without its suffix; may be given as the first argument."""

    documents: int = 3
    """Number of documents to show, the first of the files."""

    max_tokens: int = 50
    """Number of tokens to show of each."""

    write_digests: bool = False
    """Write PREFIX.bin.xxh3, digests of the .bin as it is: for files made elsewhere, or changed on
    purpose. Later readers compare the .bin with them."""
