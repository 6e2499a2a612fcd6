"""Executors of distributed work: this machine's processes, a SLURM array, or a Ray cluster.

SLURM and Ray use datatrove, which is needed for them alone. All of them mark finished
tasks with the same files, and skip those that are finished.
"""

import fcntl
import logging
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Literal

from megatron.common.errors import BusyError, ConfigError, MegatronError, needed_for
from megatron.common.process_pool import ordered_map
from megatron.common.progress import with_progress
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.corpora.corpus.steps import Step

log = logging.getLogger(__name__)

ExecutorName = Literal["local", "slurm", "ray"]


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs the tasks of steps, of each step those that are not finished.

    Args:
        folder: for a folder of each step, with its logs and a file for each finished task.
        workers: tasks that run at the same time.
        slurm: arguments of sbatch by name, without dashes; `time` and `partition` among them.
        path: folder of this program, for tasks on other machines.
    """

    name: ExecutorName
    folder: Path
    workers: int
    slurm: Mapping[str, str] = field(default_factory=dict)
    path: str = ""

    def run(self, steps: Sequence[Step]) -> bool:
        """Run all steps; return whether they are finished, and not only submitted to SLURM.

        Raises:
            BusyError: another process runs them.
            ConfigError: datatrove is missing.
            MegatronError: tasks failed.
        """
        with _lock(self.folder):
            if self.name == "slurm":
                self._submit(steps)
                return not any(self.unfinished_tasks(step) for step in steps)
            for step in steps:
                if not self.unfinished_tasks(step):
                    continue
                if self.name == "ray":
                    self._run_on_ray(step)
                else:
                    self._run_here(step)
                if failed := self.unfinished_tasks(step):
                    raise MegatronError(
                        f"{len(failed)} tasks of step {step.name} failed, the first is {failed[0]}; "
                        f"see {self.folder / step.name / 'logs'}, and run the same command again"
                    )
        return True

    def unfinished_tasks(self, step: Step) -> list[int]:
        """Return the tasks of a step that are not finished."""
        return [task for task in range(step.tasks) if not _marker(self.folder, step, task).exists()]

    def forget_finished(self, steps: Sequence[Step]) -> None:
        """Let the tasks of these steps run again, for their output was removed.

        Raises:
            BusyError: another process runs them.
        """
        with _lock(self.folder):
            for step in steps:
                shutil.rmtree(_marker(self.folder, step, 0).parent, ignore_errors=True)

    def _run_here(self, step: Step) -> None:
        tasks = self.unfinished_tasks(step)
        log.info("step %s: %d of %d tasks to run", step.name, len(tasks), step.tasks)
        done = ordered_map(_RunTask(step, self.folder), tasks, min(self.workers, len(tasks)))
        for _ in with_progress(done, f"step {step.name}", len(tasks), "tasks"):
            pass

    def _run_on_ray(self, step: Step) -> None:
        # The workers' PYTHONPATH, which Ray puts in, stays.
        environment = {"env_vars": {"PYTHONPATH": f"{self.path}:${{PYTHONPATH}}"}}
        make = _datatrove("RayPipelineExecutor")
        options = {**self._options(step), "ray_remote_kwargs": {"runtime_env": environment}}
        with needed_for("--executor ray", "ray"):
            make(**options, workers=self.workers).run()

    def _submit(self, steps: Sequence[Step]) -> None:
        """Submit one array for each step, which waits for the one before."""
        if not any(self.unfinished_tasks(step) for step in steps):
            return
        make = _datatrove("SlurmPipelineExecutor")
        slurm = dict(self.slurm)
        environment = (
            f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={self.path}:$PYTHONPATH"
        )
        executor = None
        named = {name: slurm.pop(name) for name in ("time", "partition", "qos") if name in slurm}
        for step in steps:
            executor = make(
                **self._options(step),
                **{"qos": "", **named},
                workers=self.workers,
                job_name=step.name,
                env_command=environment,
                # Otherwise jobs after a failed step stay in the queue for ever.
                sbatch_args={"kill-on-invalid-dep": "yes", **slurm},
                depends=executor,
            )
        try:
            if executor is not None:
                executor.run()
        except FileNotFoundError as error:
            raise ConfigError(f"--executor slurm: no {error.filename} on this machine") from error
        except CalledProcessError as error:
            raise ConfigError(
                "--executor slurm: sbatch refused a job (its message is above); correct --slurm, "
                "cancel the jobs that wait, and run the same command again"
            ) from error

    def _options(self, step: Step) -> dict[str, Any]:
        return {
            "pipeline": [_DatatroveStep(step)],
            "tasks": step.tasks,
            "logging_dir": str(self.folder / step.name),
        }


@dataclass(frozen=True)
class _RunTask:
    """Runs a task of a step in this process, and marks it as finished."""

    step: Step
    folder: Path

    def __call__(self, task: int) -> None:
        _run(self.step, task)
        marker = _marker(self.folder, self.step, task)
        with write_errors_name(marker):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


class _DatatroveStep:
    """A step as a block of datatrove's pipelines, run in the folder of this process."""

    def __init__(self, step: Step):
        self._step = step
        self._folder = os.getcwd()

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        os.chdir(self._folder)
        _run(self._step, rank)


def _run(step: Step, task: int) -> None:
    # Merges open a file of every task.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    step.run(task)


def _marker(folder: Path, step: Step, task: int) -> Path:
    """Return the file that marks a task as finished, under the name of datatrove's executors."""
    return folder / step.name / "completions" / f"{task:05d}"


def _datatrove(name: str) -> Any:
    with needed_for("--executor slurm or ray", "datatrove"):
        import datatrove.executor
    return getattr(datatrove.executor, name)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    path = folder / "lock"
    with write_errors_name(path), path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(f"another process works in {folder}") from error
        yield
