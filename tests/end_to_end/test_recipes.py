"""Each recipe of docs/recipes runs, in a folder without data, and has the result that it promises.

A plan of the full size that does not fit its GPUs ends with 1, and so does the page. That of SLURM runs in tests/cluster/test_recipe.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import journal, losses
from pages_of_docs import RECIPES, blocks_of, checkout
from run_blocks import run_page

from megatron.training.loop.journal import read_journal


def validation(save: Path, group: str) -> list[float]:
    """Return the validation losses of a group, the first evaluation first."""
    return [r["lm_loss"] for r in journal(save, "evaluation") if r["set"] == group]


def codeparrot(folder: Path, printed: str) -> None:
    first, *_, last = losses(folder / "codeparrot_checkpoints")
    assert last < first - 0.5
    assert "def hello_world():" in printed


def multilingual(folder: Path, printed: str) -> None:
    first, *_, last = losses(folder / "multilingual")
    assert last < first - 1
    for language in ("en", "fr", "sw"):
        first, *_, last = validation(folder / "multilingual", language)
        assert last < first - 0.5
    config = json.loads((folder / "bloom-small" / "config.json").read_text())
    assert config["model_type"] == "bloom"


def continue_llama(folder: Path, printed: str) -> None:
    for corpus in ("own", "general"):
        before = float(re.search(rf"^{corpus} loss at .* lm loss value: (\S+)", printed, re.M)[1])
        assert validation(folder / "continued", corpus)[-1] < before - 1
    config = json.loads((folder / "llama-own" / "config.json").read_text())
    assert config["model_type"] == "llama"


def chat(folder: Path, printed: str) -> None:
    first, *_, last = validation(folder / "chat", "valid")
    assert last < first
    assert "The capital of Norway is Oslo. stop\n" in printed


def squad(folder: Path, printed: str) -> None:
    best = max(record["f1"] for record in journal(folder / "answers", "task"))
    (again, *_) = journal(folder / "scored", "task")
    assert again["f1"] == best > 60
    assert (folder / "scored" / "predictions_squad-dev" / "predictions.json").is_file()
    config = json.loads((folder / "answers-hf" / "config.json").read_text())
    assert config["architectures"] == ["MegatronBertForQuestionAnswering"]


def seven_billion(folder: Path, printed: str) -> None:
    assert "flags of the first: --tensor-model-parallel-size 2" in printed
    first, *_, last = losses(folder / "run")
    assert last < first - 0.5
    assert "training is done after 40 iterations" in printed


def resize(folder: Path, printed: str) -> None:
    assert printed.count("reshaping") == 1
    here, undisturbed = losses(folder / "run"), losses(folder / "undisturbed")
    assert here == pytest.approx(undisturbed, rel=1e-5)
    assert [r["consumed_samples"] for r in journal(folder / "run", "train")] == [40, 80, 120, 160]


def nan(folder: Path, printed: str) -> None:
    assert "exit code 1\n" in printed
    assert "--ckpt-step 20 resumes from the one before it" in printed
    assert "step 25 equals the journal, bit for bit" in printed
    steps = {
        record["iteration"]: record["lm_loss"]
        for record in read_journal(folder / "run")
        if record["event"] == "step"
    }
    assert max(steps) == 40 and steps[40] < steps[1]
    assert (folder / "run" / "aside-global_step21").is_dir()


RESULTS: dict[str, Callable[[Path, str], None]] = {
    "codeparrot": codeparrot,
    "multilingual": multilingual,
    "continue_llama": continue_llama,
    "chat": chat,
    "squad": squad,
    "seven_billion": seven_billion,
    "resize": resize,
    "nan": nan,
}


DAY = 24
GPU_HOURS = {
    "codeparrot": 8 * 6,
    "multilingual": 32 * 4 * DAY,
    "continue_llama": 8 * 4,
    "chat": 8 * 0.5,
    "squad": 8 * 11 * DAY,
    "seven_billion": 64 * 36 * DAY,
}
"""Estimates in the tables of the pages: GPUs times hours."""


@pytest.mark.parametrize("recipe", RESULTS)
def test_a_recipe_has_its_result(recipe: str, tmp_path: Path) -> None:
    folder = checkout(tmp_path / "checkout")
    printed = run_page(RECIPES / f"{recipe}.md", folder)
    RESULTS[recipe](folder, printed)
    if recipe in GPU_HOURS:
        ((low, high),) = re.findall(r"GPU hours: ([\d,.]+) to ([\d,.]+)", printed)
        assert float(low.replace(",", "")) <= GPU_HOURS[recipe] <= float(high.replace(",", ""))


def test_every_recipe_is_run() -> None:
    pages = {page.stem for page in RECIPES.glob("*.md") if blocks_of(page, "bash")}
    assert pages == {*RESULTS, "slurm"}
