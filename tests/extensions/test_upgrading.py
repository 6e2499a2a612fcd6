"""Files of older versions are read: token files, their tokenizers' records, and checkpoints.

tests/upgrade/ holds what the programs of these versions wrote on one CPU: step 2 of runs of 4
steps, with the losses that they logged for the other two. version_0.1.tar.xz is of commit a19a09c4,
version_1.0.tar.xz of commit 93554738.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from jobs import REPOSITORY, journal, start_ranks

from megatron.checkpointing.compare import layout_changes, other_changes, require_same
from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import damage, read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.saved_run import read_saved_run
from megatron.config.config import parse_config
from megatron.config.objectives import declaration_of
from megatron.config.plan.plan import plan
from megatron.extensions.nemo.flags import nemo_flags
from megatron.extensions.nemo.flags_tasks import NEMO_TASKS
from megatron.extensions.tasks.epochs import with_steps_of_epochs

FILES = REPOSITORY / "tests" / "upgrade"
NETWORK_0_1 = "--num-layers 2 --hidden-size 8 --num-attention-heads 2"
NETWORK = "--num-layers 2 --hidden-size 4 --num-attention-heads 2"
STEPS = "--log-interval 1 --save-interval 2"
RUN = f"""
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --lr 1e-2 --train-iters 4
    --eval-iters 0 {STEPS}
"""
VERSION_0_1 = f"{NETWORK_0_1} {RUN}"
VERSION_1_0 = f"{NETWORK} {RUN} --make-vocab-size-divisible-by 4"
CORPUS = "--data-path corpus_text_document --vocab-file vocab.json --merge-file merges.txt"
SENTENCES = "--data-path text_text_sentence --vocab-file bert.txt"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


@dataclass(frozen=True)
class Saved:
    """A run of an older version.

    Args:
        losses: of steps 3 and 4, as that version logged them.
        script: what trained it, without the suffix.
        ranks: how many processes.
    """

    losses: tuple[float, float]
    script: str
    flags: str
    ranks: int = 1


RUNS = {
    "gpt": Saved(
        (5.506892681121826, 5.4798970222473145),
        "pretrain_gpt",
        f"{VERSION_1_0} {CORPUS} --num-attention-heads 4 --kv-channels 2 --swiglu "
        "--position-embedding-type rotary --group-query-attention --num-query-groups 2 "
        "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear",
    ),
    "bf16": Saved(
        (5.4840240478515625, 5.454364776611328),
        "pretrain_gpt",
        f"{VERSION_1_0} {CORPUS} --bf16 {NO_DROPOUT}",
    ),
    "layout": Saved(
        (5.483608245849609, 5.453976154327393),
        "pretrain_gpt",
        f"{VERSION_1_0} {CORPUS} {NO_DROPOUT} --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --zero-stage 1",
        ranks=4,
    ),
    "experts": Saved(
        (5.48519229888916, 5.456941604614258),
        "pretrain_gpt",
        f"{VERSION_1_0} {CORPUS} {NO_DROPOUT} --num-experts 2 --expert-interval 1",
    ),
    "lora": Saved(
        (5.549006938934326, 5.542343616485596),
        "pretrain_gpt",
        f"{VERSION_1_0} {CORPUS} --lora-rank 2",
    ),
    "prefix_lm": Saved(
        (4.5102458000183105, 6.099477767944336),
        "pretrain_prefix_lm",
        f"{VERSION_1_0} {CORPUS} --reset-attention-mask --reset-position-ids "
        "--loss-on-targets-only",
    ),
    "sft": Saved(
        (5.447329998016357, 5.433849334716797),
        "finetune_sft",
        f"{VERSION_1_0} {CORPUS} --data-path chats --seq-length 32 --max-position-embeddings 32 "
        "--reset-position-ids",
    ),
    "bert": Saved(
        (2.94232177734375, 2.9519033432006836), "pretrain_bert", f"{VERSION_1_0} {SENTENCES}"
    ),
    "t5": Saved(
        (4.682774543762207, 4.687646389007568),
        "pretrain_t5",
        f"{VERSION_1_0} {SENTENCES} --decoder-seq-length 8",
    ),
    "retro": Saved(
        (4.1081695556640625, 4.106768608093262),
        "pretrain_retro",
        f"{NETWORK} --num-layers 6 --lr 3e-3 --micro-batch-size 2 --vocab-size 60 {STEPS} "
        "--make-vocab-size-divisible-by 4 --retro-project-dir project --retro-add-retriever "
        "--retro-encoder-layers 1",
    ),
    "mnli": Saved(
        (1.1113667488098145, 1.0734623670578003),
        "tasks/main",
        f"{VERSION_1_0} --eval-iters 1 --task MNLI --train-data MNLI/train.tsv "
        "--valid-data MNLI/dev_matched.tsv --vocab-file words.txt",
    ),
    "tags": Saved(
        (1.0899187326431274, 1.0785489082336426),
        "tasks/token_classification",
        f"--config-name nemo exp_manager.exp_dir=tags exp_manager.resume_if_exists=true {NETWORK} "
        f"{STEPS}",
    ),
}
"""Runs of version 1.0, by the directory of their checkpoints."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of version 1.0."""
    return unpacked("version_1.0", tmp_path_factory.mktemp("upgrade"))


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FILES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def require_continued(run: Saved, folder: Path, save: str) -> None:
    """Resume a run; it logs the losses that the older version did."""
    words = run.flags.split()
    if run.script != "tasks/token_classification":
        words += ["--save", save, "--load", save]
    script = str(REPOSITORY / f"{run.script}.py")
    start_ranks(run.ranks, *words, script=script, folders=[folder] * run.ranks).succeeded()
    records = journal(folder / save, "train")
    assert [record["iteration"] for record in records] == [3, 4]
    # CPUs with matrix units for bf16 round otherwise.
    tolerance = 2e-3 if "--bf16" in words else 1e-5
    assert [record["lm_loss"] for record in records] == pytest.approx(run.losses, abs=tolerance)


def test_a_run_of_version_0_1_continues_with_its_own_steps(tmp_path: Path) -> None:
    run = Saved((5.753661, 5.686898), "pretrain_gpt", f"{VERSION_0_1} {CORPUS}")
    require_continued(run, unpacked("version_0.1", tmp_path), "run")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_version_1_0_continues_with_its_own_steps(name: str, written: Path) -> None:
    require_continued(RUNS[name], written, name)


def plan_again(name: str, vocab_size: int) -> dict[str, Any]:
    """Plan a run by its command line; return the plan as a manifest holds it."""
    run, words = RUNS[name], RUNS[name].flags.split()
    if name == "tags":
        task = "token-classification"
        words = [f"--task={task}", *nemo_flags(words, NEMO_TASKS[task], world_size=run.ranks)]
    config = with_steps_of_epochs(parse_config(words)[0], world_size=run.ranks)
    objective = read_saved_run(name).objective
    made = plan(
        config, world_size=run.ranks, vocab_size=vocab_size, device="cpu", objective=objective
    )
    return made.to_dict()


@pytest.mark.parametrize("name", RUNS)
def test_the_flags_of_a_run_plan_what_was_saved(
    name: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written)
    saved = read_manifest(Path(name, "global_step2")).plan
    current = plan_again(name, saved["model"]["vocab_size"])
    require_same(saved, current, name, with_schedule=True, with_samples=True)
    assert [*layout_changes(saved, current), *other_changes(saved, current)] == []


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_read_and_described(
    name: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written / name / "global_step2"
    manifest = read_manifest(folder)
    assert damage(folder, manifest.files) == []
    checkpoint = read_checkpoint(folder, manifest)
    load_network(manifest.spec, checkpoint)
    inspect = run_path(str(REPOSITORY / "tools" / "checkpoint" / "inspect.py"))["main"]
    inspect([str(written / name), "--parameters"])
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split(" ")[0] for line in lines}
    assert {*checkpoint.parameters} <= shown
    script = declaration_of(read_saved_run(str(written / name)).objective).script
    assert f"resume with: {script} --use-checkpoint-args --load {written / name} " in "".join(lines)
