"""The launchers above this process: whether they are alive, and their root-cause files."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from megatron.training.process.environment import root_cause_file


class Launchers:
    """The process that started this one, and the one that started that for the same job.

    `deepspeed` starts a launcher on each node, which starts the ranks; when either is killed,
    no process ends the ranks any more. A shell above them may end without meaning anything.

    Args:
        is_parent: whether this process's parent is a launcher; otherwise no process is watched.
    """

    def __init__(self, *, is_parent: bool):
        self._parents: dict[int, int | None] = {}
        if is_parent:
            parent = os.getppid()
            self._parents[os.getpid()] = parent
            above = _parent_of(parent)
            if above and _is_deepspeed(above):
                self._parents[parent] = above

    def are_gone(self) -> bool:
        """Whether one of them has ended: its child has another parent then."""
        return any(_parent_of(child) != parent for child, parent in self._parents.items())


def write_root_cause(message: str) -> None:
    """Write why this process fails to TORCHELASTIC_ERROR_FILE, which torch's launcher prints.

    Without the file it names this process and a page about tracebacks. The first message stays.

    Source: ErrorHandler.record_exception and ProcessFailure of
    torch.distributed.elastic.multiprocessing.errors.
    """
    file = root_cause_file()
    if file is None:
        return
    more = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": message, "extraInfo": more}})
    # A full disk hides no error: it is on stderr too.
    with suppress(OSError), file.open("x", encoding="utf-8") as stream:
        stream.write(content)


def _parent_of(pid: int) -> int | None:
    import psutil  # milliseconds, which tools that only write root causes would take at their start

    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return None


def _is_deepspeed(pid: int) -> bool:
    import psutil

    with suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
        return any(Path(w).name in ("deepspeed", "ds", "deepspeed.launcher.runner") for w in words)
    return False
