"""Which checkpoint a tool opens, and what its command line asks of it. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.names import published_tags
from megatron.config.config import Config, parse_config_for_checkpoint
from megatron.config.flags import value_in
from megatron.errors import CheckpointError, ConfigError
from megatron.plan.generation_plan import LAYOUT


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint and what is asked of it.

    Args:
        own: the tool's own sections, by name.
    """

    folder: Path
    manifest: Manifest
    config: Config
    own: Mapping[str, Any]


def read_wishes(
    argv: Sequence[str], sections: Mapping[str, type], *, description: str | None
) -> Source:
    """Return the newest checkpoint of --load and what `argv` asks of it.

    Flags that are left out are those of the training run, but for the layout.

    Args:
        sections: the tool's own, by name.

    Raises:
        ConfigError: a flag is unknown, refused or malformed, or --load is missing.
        CheckpointError: there is no checkpoint.
    """
    parse = partial(parse_config_for_checkpoint, extra=sections, description=description or "")
    load = value_in(argv, "--load")
    if load is None:
        if {"-h", "--help"} & set(argv):
            parse(argv, {})  # prints the help and leaves
        raise ConfigError("--load is missing: the directory that a run saved to with --save")
    tags = published_tags(Path(load))
    if not tags:
        raise CheckpointError(f"--load {load} holds no complete checkpoint")
    folder = Path(load) / tags[0]
    manifest = read_manifest(folder)
    trained = {
        section: {name: value for name, value in fields.items() if name not in LAYOUT}
        for section, fields in manifest.config.items()
    }
    config, own = parse(argv, trained)
    return Source(folder=folder, manifest=manifest, config=config, own=own)
