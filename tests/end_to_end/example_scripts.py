"""Runs of the scripts of examples/, with networks as small as can be."""

from pathlib import Path

from jobs import REPOSITORY, Finished, clean_environment, start
from ports import free_port
from quick_python import write_launchers

SMALL = {
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "NUM_ATTENTION_HEADS": "4",
    "SEQ_LENGTH": "32",
    "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "4",
    "TRAIN_ITERS": "2",
    "LOG_INTERVAL": "1",
    "EVAL_ITERS": "1",
    "LR": "3e-3",
}


def example(name: str, folder: Path, *flags: str, **variables: str) -> Finished:
    """Run a script from `folder`, on a port that other jobs do not use."""
    script = str(REPOSITORY / "examples" / name)
    port = str(free_port())
    programs = write_launchers(folder / ".programs", port=port)
    path = f"{programs}:{clean_environment()['PATH']}"
    variables = {"MASTER_PORT": port, "PATH": path, **variables}
    return start("bash", script, *flags, cwd=folder, **variables).succeeded()
