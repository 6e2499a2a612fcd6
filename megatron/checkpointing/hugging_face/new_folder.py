"""A folder of files that is there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpointing.names import STAGING
from megatron.common.atomic_files import staged_folder
from megatron.common.errors import CheckpointError, WrongCheckpointError, reason


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside `output` to write to, which gets its name when nothing went wrong.

    Raises:
        CheckpointError: `output` holds something, is the current folder, or cannot be replaced or
            written to; nothing is left of what was written.
    """
    whole = output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WrongCheckpointError(f"--save {output} holds something already: give a new folder")
    if whole == Path.cwd():
        raise WrongCheckpointError(
            f"--save {output} is the current folder, which the finished one would take from under "
            "the shell: give a new folder"
        )
    if os.path.ismount(output):
        raise WrongCheckpointError(
            f"--save {output} is where a disk is mounted, which no finished folder can take the "
            f"place of: give a folder in it, such as {output / 'model'}"
        )
    try:
        with staged_folder(whole.with_name(f"{STAGING}{whole.name}"), whole) as staging:
            yield staging
    except OSError as error:
        raise CheckpointError(f"--save {output}: {reason(error, output)}") from error
