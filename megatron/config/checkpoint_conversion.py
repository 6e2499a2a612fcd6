"""Command lines of tools that convert checkpoints: flags of training beside the tool's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.config import SECTIONS, Config, flatten
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.foreign_flags.legacy_checkpoint_conversion import ANY_RUN
from megatron.config.parsing.files import with_file_flags
from megatron.config.parsing.flags import Legacy, parse_sections


@dataclass(frozen=True)
class ConversionCommand:
    """What is asked of training and of the tool, and what the user should read."""

    config: Config
    own: Any
    notices: Sequence[str]


def parse_conversion(
    found: Sequence[str],
    argv: Sequence[str],
    own: type,
    *,
    legacy: Sequence[Legacy] = (),
    description: str | None = None,
) -> ConversionCommand:
    """Return what `argv` asks for; what it does not say is what the files say.

    Args:
        found: words of a command line, for what the files say.
        own: the tool's own section.
        legacy: further flags to refuse or to accept with a notice.

    Raises:
        ConfigError: a flag is unknown, refused or malformed.
    """
    parsed = parse_sections(
        [*found, *with_file_flags(argv, SECTIONS)],
        {**SECTIONS, "own": own},
        description=description or "",
        legacy=[*LEGACY, *legacy],
        defaults=flatten(ANY_RUN),
    )
    said = parsed.sections.pop("own")
    return ConversionCommand(Config(**parsed.sections), said, parsed.notices)
