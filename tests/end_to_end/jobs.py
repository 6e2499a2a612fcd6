"""Starting training jobs, and reading what they left.

`start` does it as a user would. The others do what is done in the processes that come of it, at the
cost of a fork each.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import without_head_start
from forks import Descriptor, exit_codes, run_script
from ports import free_port
from quick_python import write_launchers

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN = str(REPOSITORY / "pretrain_gpt.py")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Corpus:
    """Token files and the tokenizer that made them."""

    prefix: str
    vocab_file: str
    merge_file: str
    text_file: str

    @property
    def flags(self) -> list[str]:
        return [
            *("--data-path", self.prefix),
            *("--vocab-file", self.vocab_file),
            *("--merge-file", self.merge_file),
        ]


@dataclass(frozen=True)
class Finished:
    """A job that has ended: one exit code and one text per rank."""

    codes: list[int]
    outputs: list[str]

    def succeeded(self) -> "Finished":
        assert set(self.codes) == {0}, "\n".join(self.outputs)
        return self


def start_ranks(
    ranks: int,
    *flags: str,
    folders: Sequence[Path | None] = (),
    script: str = PRETRAIN,
) -> Finished:
    """Run `script` in `ranks` processes with the variables a launcher would set.

    Args:
        folders: each rank's working directory; default: this process's.
    """
    port = str(free_port())
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {**clean_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return _run_forks(
        [script, *flags],
        [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
        folders or [None] * ranks,
    )


def tool(script: str, *words: str, cwd: Path | None = None) -> Finished:
    """Run a Python program of the repository, named from its root, to its end."""
    return _run_forks([str(REPOSITORY / script), *words], [clean_environment()], [cwd])


def _run_forks(
    words: Sequence[str], environments: Sequence[dict[str, str]], folders: Sequence[Path | None]
) -> Finished:
    """Run `python words...` in one process per environment: forks of one that has imported all."""
    with contextlib.ExitStack() as stack:
        nothing = Descriptor(stack.enter_context(open(os.devnull)).fileno())
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in environments]
        printed = [Descriptor(file.fileno()) for file in files]
        calls = [
            (words, environment, str(folder or Path.cwd()), nothing, output, output)
            for environment, folder, output in zip(environments, folders, printed, strict=True)
        ]
        codes = exit_codes(_run_script, calls, timeout_s=TIMEOUT_S)
        for file in files:
            file.seek(0)
        texts = [file.read().decode(errors="replace") for file in files]
    if None in codes:
        raise TimeoutError("\n".join([f"no end after {TIMEOUT_S} s:", *texts]))
    return Finished(codes, texts)


def _run_script(*words: Any) -> None:
    """Run a script; a rank that fails does not wait for a launcher, which there is none of."""
    without_head_start(0)
    run_script(*words)


def start(*words: str, cwd: Path | None = None, **environment: str) -> Finished:
    """Run a command to its end."""
    process = subprocess.Popen(
        words,
        env=clean_environment() | environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=TIMEOUT_S)[0]
    finally:
        # A launcher that is killed leaves its ranks behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Finished([process.returncode], [output])


def launched(ranks: int, *flags: str) -> Finished:
    """Run pretrain_gpt.py under the deepspeed launcher."""
    with tempfile.TemporaryDirectory() as folder:
        programs = write_launchers(Path(folder), port=str(free_port()))
        path = os.pathsep.join([str(programs), clean_environment()["PATH"]])
        return start("deepspeed", "--num_gpus", str(ranks), PRETRAIN, *flags, PATH=path)


def clean_environment() -> dict[str, str]:
    """Return this process's variables without those that describe a job, and one thread a rank.

    Tensors here are tiny; more threads would only wait for each other.
    """
    bin_folder = str(Path(sys.executable).parent)
    return {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "PATH": bin_folder + os.pathsep + os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
    }


def journal(save: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of `event` that a run left, the oldest first."""
    lines = (save / "journal.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def losses(save: Path) -> list[float]:
    """Return the loss of every logged interval."""
    return [record["lm_loss"] for record in journal(save, "train")]
