"""Every option of a training run changes something that can be seen, or says why not.

One job of one process and one of two turn all options, one after the other.
"""

import gc
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from option_files import write_files
from options import BASE, OPTIONS, Turned, Unseen
from ranks import run_on_ranks

from megatron.config.config import all_sections

NAMES = [field.name for section in all_sections().values() for field in fields(section)]
TURNED = {name: entry for name, entry in OPTIONS.items() if isinstance(entry, Turned)}
TIMEOUT_S = 500


def words_of(text: str, without: Iterable[str], files: Path) -> list[str]:
    """Return the command line that `text` adds to BASE."""
    words = shlex.split(BASE)
    for flag in without:
        place = words.index(flag)
        del words[place : place + 2]
    return [word.replace("{files}", str(files)) for word in (*words, *shlex.split(text))]


def run_of(entry: Turned) -> Turned:
    """Return the run in which the option is turned; runs of the same command line are equal."""
    words = " ".join(f"{entry.on} {entry.flags}".split())
    return replace(entry, on=words, flags="", sees="", says="", on_says="")


def base_of(entry: Turned) -> Turned:
    """Return the run that `entry` is compared with."""
    return run_of(replace(entry, flags=""))


class Runs:
    """Runs numbered one after the other, each in a directory of its own.

    Args:
        files: what `write_files` wrote.
        folder: where the runs' directories are.
    """

    def __init__(self, files: Path, folder: Path):
        self._files, self._folder, self._count = files, folder, 0

    def observe(self, run: Turned) -> dict[str, Any]:
        """Return what is seen of a run, see `run_of`, on all ranks, by aspect."""
        import observed

        self._count += 1
        folder = self._folder / str(self._count)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        seen = observed.observe(
            words_of(run.on, run.without, self._files),
            folder,
            objective=run.objective,
            as_gpu=run.as_gpu,
            parts=run.parts,
        )
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, seen)
        return {aspect: [one[aspect] for one in everywhere] for aspect in seen}


def turn_all(rank: int, names: list[str], files: Path, folder: Path) -> None:
    """Turn the options one by one; write what is wrong with each to a file."""
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        "OMP_NUM_THREADS": "1",
        # Options that need a GPU are seen to be refused.
        "CUDA_VISIBLE_DEVICES": "",
    }
    from megatron.checkpointing.resharding.universal import write_universal

    runs = Runs(files, folder)
    if dist.get_world_size() == 1:
        save = f"--train-iters 4 --exit-interval 2 --save {files}/checkpoint --save-interval 2"
        runs.observe(run_of(Turned(save, "saved")))
        write_universal(
            files / "checkpoint" / "global_step2",
            files / "universal" / "global_step2_universal",
            workers=1,
        )
    gc.freeze()
    bases: dict[Turned, dict[str, Any]] = {}
    all_bases = {base_of(TURNED[name]) for name in names}

    def observe(run: Turned) -> dict[str, Any]:
        """Run it, unless it is a base that has run before, perhaps as another option's turned run."""
        if run in bases:
            return bases[run]
        seen = runs.observe(run)
        if run in all_bases:
            bases[run] = seen
        return seen

    wrong: dict[str, str] = {}
    for name in names:
        entry = TURNED[name]
        wrong[name] = problem_of(entry, observe(base_of(entry)), observe(run_of(entry)))
        if rank == 0:
            (folder / "wrong.json").write_text(json.dumps(wrong))
    # What the turned runs left behind in this process would show as a difference.
    for base, before in bases.items():
        if changed := differences(before, runs.observe(base)):
            users = [name for name in names if base_of(TURNED[name]) == base]
            for name in users:
                wrong[name] += f"two runs of its base differ in {changed}"
    if rank == 0:
        (folder / "wrong.json").write_text(json.dumps(wrong))


def problem_of(entry: Turned, base: Mapping[str, Any], turned: Mapping[str, Any]) -> str:
    """Return why it is not seen that the option does something; empty when it is seen."""
    expected = {"base": (base, entry.on_says), "turned": (turned, entry.says)}
    for name, (seen, says) in expected.items():
        errors = [error for error in seen["error"] if error]
        if bool(errors) != bool(says) or not all(says in error for error in errors):
            return f"the {name} run should end with {says!r}: {errors}"
    if base[entry.sees] == turned[entry.sees]:
        return f"{entry.sees} do not change, only {differences(base, turned)}"
    return ""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the aspects in which two observations differ."""
    return [aspect for aspect in one if one[aspect] != other[aspect]]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what is wrong with each option; nothing where it does what it should."""
    found: dict[str, str] = {}
    for ranks in (1, 2):
        files, folder = (tmp_path_factory.mktemp(f"{kind}{ranks}") for kind in ("files", "runs"))
        write_files(files)
        names = [name for name, entry in TURNED.items() if entry.ranks == ranks]
        try:
            run_on_ranks(ranks, turn_all, folder, names, files, folder, timeout_s=TIMEOUT_S)
        except Exception as error:
            found |= dict.fromkeys(names, f"did not run: {error}")
        output = folder / "wrong.json"
        found |= json.loads(output.read_text()) if output.exists() else {}
    return found


def test_every_option_is_turned_or_has_a_reason():
    assert [name for name in NAMES if name not in OPTIONS] == []
    assert [name for name in OPTIONS if name not in NAMES] == []
    reasons = [entry.reason for entry in OPTIONS.values() if isinstance(entry, Unseen)]
    assert [text for text in reasons if len(text.split()) < 5 or not text.endswith(".")] == []


@pytest.mark.parametrize("name", TURNED)
def test_an_option_changes_what_can_be_seen(name, wrong):
    assert wrong[name] == ""


def test_an_option_without_effect_is_found():
    seen = {"losses": [[1.0]], "log": [["a"]], "error": [[]]}
    entry = Turned("--flag", "losses")
    assert problem_of(entry, seen, seen | {"losses": [[2.0]]}) == ""
    assert problem_of(entry, seen, seen | {"log": [["b"]]}) == "losses do not change, only ['log']"
    failed = seen | {"losses": [[]], "error": ["no such thing"]}
    assert "should end with ''" in problem_of(entry, seen, failed)
    assert "should end with 'GPU'" in problem_of(replace(entry, says="GPU"), seen, failed)
