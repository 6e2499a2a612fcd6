"""What a run restores from a checkpoint, and which checkpoints it renames."""

from dataclasses import replace

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.manifest import (
    CONVERTED_FROM,
    MANIFEST,
    published_tags,
    read_manifest,
    write_manifest,
)
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.data.datasets.run_datasets import CorpusUse
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.guards.loss_spikes import Spike, go_back
from megatron.training.loop.journal import Journal, read_journal


def test_reset_progress_and_finetune_start_at_iteration_0(job, tmp_path):
    job.save(5)
    elsewhere = ["--save", str(tmp_path / "elsewhere")]
    assert job.resume("--reset-progress", *elsewhere) == TrainState()
    assert job.engine.parts == {"optimizer": True, "streams": True}
    assert job.resume("--finetune", *elsewhere) == TrainState()
    assert job.engine.parts == {"optimizer": False, "streams": False}


def test_finetune_allows_another_optimizer(job, tmp_path):
    job.save(5)
    with problem("--optimizer … adam … sgd", CheckpointError):
        job.resume("--optimizer", "sgd")
    elsewhere = ["--save", str(tmp_path / "elsewhere")]
    assert job.resume("--optimizer", "sgd", "--finetune", *elsewhere) == TrainState()


def test_ckpt_step_renames_the_later_checkpoints(job, messages):
    for iteration in (5, 10, 15):
        job.save(iteration)
    assert job.resume("--ckpt-step", "5") == TrainState(iteration=5, samples=10)
    assert published_tags(job.directory) == ["global_step5"]
    assert (job.directory / "latest").read_text() == "global_step5"
    assert (job.directory / "aside-global_step15" / MANIFEST).exists()
    assert "aside-global_step15, aside-global_step10" in messages[-1]
    # Once more, after the same steps were taken again.
    job.checkpoints = Checkpoints(job.engine, job.plan, job.config, saved=5)
    job.save(10)
    job.resume("--ckpt-step", "5")
    assert (job.directory / "aside-2-global_step10" / MANIFEST).exists()
    with problem("--ckpt-step 10 … global_step5", CheckpointError):
        job.resume("--ckpt-step", "10")


def test_eval_only_renames_nothing(job):
    job.save(5)
    job.save(10)
    assert job.resume("--ckpt-step", "5", "--eval-only") == TrainState(iteration=5, samples=10)
    assert published_tags(job.directory) == ["global_step10", "global_step5"]


def test_ckpt_step_with_another_save_renames_nothing(job, tmp_path):
    job.save(5)
    job.save(10)
    job.resume("--ckpt-step", "5", "--save", str(tmp_path / "elsewhere"))
    assert published_tags(job.directory) == ["global_step10", "global_step5"]


def test_a_rollback_skips_damaged_checkpoints(job, messages):
    for iteration in (5, 10, 15, 20):
        job.save(iteration)
    (job.directory / "global_step15" / "weights.pt").write_bytes(b"")
    (job.directory / "global_step10" / MANIFEST).write_text("{")
    state = TrainState(iteration=17, spikes=((2, 3),))
    plan = tiny_plan(*job.flags, "--spike-policy", "rollback=1")
    journal = Journal(job.directory)
    go_back(job.engine, plan, state, Spike(17, "loss 9"), journal)
    assert state == TrainState(iteration=5, samples=10, spikes=((2, 3), (17, 17)))
    assert job.engine.loaded == [(job.directory, "global_step5")]
    assert len([text for text in messages if "is skipped: " in text]) == 2
    (record,) = read_journal(job.directory)
    assert record["passed_over"] == [17, 17]
    assert record["all_passed_over"] == [[2, 3], [17, 17]]


def test_skipped_spikes_are_part_of_the_state(job):
    job.checkpoints.save(TrainState(iteration=5, spikes=((3, 4),)))
    assert job.resume() == TrainState(iteration=5, spikes=((3, 4),))


def test_another_order_of_samples_gives_a_warning(job, messages):
    job.save(5)
    use = CorpusUse("corpus", 1.0, 1.0, 4, tokens=61, samples_wanted=20, epochs=2.0, size_for=int)
    for flags, reason in (
        ([], ""),
        (["--seed", "7"], "--seed was 1234 and is 7"),
        (["--train-iters", "5"], "corpus is shuffled over 1 epoch, and was over 2"),
        (["--train-iters", "5", "--finetune", "--save", "elsewhere"], ""),
    ):
        messages.clear()
        plan = tiny_plan(*job.flags, "--override-opt_param-scheduler", *flags)
        resume(job.engine, plan, TrainState(), choose_checkpoint(plan), uses=[use])
        warnings = [line for line in messages if "come in another order" in line]
        assert len(warnings) == bool(reason)
        assert all(reason in line and "--exit-interval" in line for line in warnings)


@pytest.fixture
def converted(job):
    """The folder of a checkpoint with the manifest of a conversion, whose run was another one."""
    job.plan = tiny_plan(
        *job.flags, "--no-save-rng", "--sample-order", "megatron-core", "--lr", "9"
    )
    job.checkpoints = Checkpoints(job.engine, job.plan, job.config)
    job.save(5)
    folder = job.directory / "global_step5"
    manifest = read_manifest(folder)
    versions = {"megatron": manifest.versions["megatron"], CONVERTED_FROM: "theirs/iter_0000005"}
    write_manifest(folder, replace(manifest, versions=versions))
    return folder


def test_what_a_conversion_does_not_know_is_not_compared(job, messages, converted):
    plan = tiny_plan(*job.flags, "--no-load-rng", "--train-iters", "7", "--global-batch-size", "2")
    use = CorpusUse("corpus", 1.0, 1.0, 4, tokens=61, samples_wanted=20, epochs=2.0, size_for=int)
    state = TrainState()
    resume(job.engine, plan, state, choose_checkpoint(plan), uses=[use])
    assert state == TrainState(iteration=5, samples=10)
    (warning,) = [line for line in messages if "successfully" not in line and "saving" not in line]
    assert warning.startswith(f"{converted} was converted from theirs/iter_0000005: the data and ")
    assert warning.endswith(
        " are not known, and this run uses those of its flags, after 10 samples"
    )
    with problem("learning rate … --override-opt_param-scheduler", WrongCheckpointError):
        job.resume("--no-load-rng", "--use-checkpoint-opt_param-scheduler")


def test_states_that_were_not_converted_are_refused_as_such(job, converted):
    with problem("theirs/iter_0000005 … RNG … --no-load-rng", WrongCheckpointError):
        job.resume()
    manifest = read_manifest(converted)
    held = {**manifest.plan["checkpoint"], "saves_optimizer": False}
    write_manifest(converted, replace(manifest, plan={**manifest.plan, "checkpoint": held}))
    words = "theirs/iter_0000005 … --dist-ckpt-optim-fully-reshardable"
    with problem(words, WrongCheckpointError):
        job.resume("--no-load-rng")
