"""Which checkpoint a run resumes from, and which it refuses."""

import errno
import io
import os
import shutil

import pytest
from problems import problem
from tiny import tiny_argv, tiny_plan

from megatron.checkpointing.manifest import MANIFEST, read_manifest, write_manifest
from megatron.checkpointing.saved_run import checkpoint_flags
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    UnreadableCheckpointError,
    WrongCheckpointError,
)
from megatron.objectives.gpt import GPT
from megatron.training import pretrain
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.save_directory import sole_writer
from megatron.training.entry import train_from
from megatron.training.process.failure import FailureFile
from megatron.training.process.watchdog import Watchdog


def test_a_run_resumes_from_the_newest(job, messages):
    job.save(5)
    job.save(10)
    assert job.resume() == TrainState(iteration=10, samples=20)
    assert job.engine.loaded == [(job.directory, "global_step10")]
    assert messages[-1] == (
        f"  successfully loaded checkpoint from {job.directory} at iteration 10"
    )


def test_a_damaged_checkpoint_is_skipped_with_a_warning(job, messages):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / "weights.pt").write_bytes(b"")
    assert job.resume("--seed", "99") == TrainState(iteration=5, samples=10)
    assert job.engine.loaded == [(job.directory, "global_step5")]
    (settings,) = [text for text in messages if "other settings" in text]
    assert "resuming from" in settings and "global_step5 " in settings
    (warning,) = [text for text in messages if "is skipped" in text]
    assert "global_step10 is skipped: " in warning
    assert "weights.pt has 0 bytes instead of " in warning


def test_a_damaged_manifest_is_skipped_with_a_warning(job, messages):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / MANIFEST).write_text("{")
    assert job.resume().iteration == 5
    assert [text for text in messages if "global_step10" in text and "is skipped" in text]


@pytest.mark.parametrize(
    ("error", "call", "module"),
    [(errno.EACCES, "open", io), (errno.EIO, "open", io), (errno.EACCES, "stat", os)],
)
def test_an_unreadable_checkpoint_is_not_skipped_as_damaged(
    job, os_calls, monkeypatch, error, call, module
):
    job.save(5)
    job.save(10)
    os_calls(call, error, on=f"global_step10/{MANIFEST}", module=module)
    messages = f"global_step10/manifest.json … {os.strerror(error)}"
    with problem(messages, UnreadableCheckpointError) as raised:
        job.resume()
    assert raised.value.exit_code is ExitCode.FAILED
    with problem(messages, UnreadableCheckpointError):
        checkpoint_flags(["--use-checkpoint-args", "--load", str(job.directory)])
    monkeypatch.undo()
    assert job.resume().iteration == 10


def test_an_unreadable_directory_is_not_an_empty_one(job, os_calls):
    job.save(5)
    os_calls("listdir", errno.EACCES)
    with problem("runs … Permission denied", UnreadableCheckpointError):
        job.resume()


@pytest.mark.parametrize("hint", [None, "global_step900", "\0\xff", "global_step5\n"])
def test_the_newest_folder_is_taken_whatever_latest_names(job, messages, hint):
    job.save(5)
    job.save(10)
    latest = job.directory / "latest"
    latest.unlink() if hint is None else latest.write_text(hint)
    assert job.resume().iteration == 10
    (warning,) = [text for text in messages if "latest in" in text]
    assert "the newest is global_step10" in warning


def test_a_newer_checkpoint_without_a_manifest_is_named(job, messages):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / MANIFEST).unlink()
    assert job.resume().iteration == 5
    (warning,) = [text for text in messages if "global_step10" in text]
    assert "global_step10 has no manifest.json and is passed over" in warning
    assert warning.endswith("the newest complete one is global_step5")


def test_the_first_job_of_a_chain_starts_from_the_beginning(job, messages):
    assert job.resume() == TrainState()
    assert job.engine.loaded == []
    assert messages == [f"no checkpoint in {job.directory} yet: training starts from the beginning"]


def test_an_empty_load_directory_is_an_error_unless_it_is_the_save_directory(job, tmp_path):
    nowhere = tmp_path / "nowhere"
    with problem("--load … /nowhere … no such directory", CheckpointError):
        job.resume("--load", str(nowhere))
    nowhere.mkdir()
    with problem("--load … /nowhere … no complete checkpoint … --save", CheckpointError):
        job.resume("--load", str(nowhere))


def test_exit_on_missing_checkpoint(job):
    assert job.resume() == TrainState()
    with problem("--load … /runs … no such directory", CheckpointError):
        job.resume("--exit-on-missing-checkpoint")


def test_only_damaged_checkpoints_are_an_error(job):
    # Starting over would replace them one by one.
    job.save(5)
    (job.directory / "global_step5" / "weights.pt").unlink()
    with problem("global_step5", CheckpointError):
        job.resume()


def test_many_damaged_checkpoints_give_a_few_log_lines(job, messages):
    job.save(5)
    for iteration in range(1000, 1300):
        folder = job.directory / f"global_step{iteration}"
        shutil.copytree(job.directory / "global_step5", folder)
        # Every other one has an intact manifest.
        (folder / ("weights.pt" if iteration % 2 else MANIFEST)).write_bytes(b"?")
    assert job.resume().iteration == 5
    assert len([text for text in messages if "is skipped" in text]) == 11
    shutil.rmtree(job.directory / "global_step5")
    messages.clear()
    with problem("--load … global_step1299 … 290 others", CheckpointError):
        job.resume()
    assert len([text for text in messages if "is skipped" in text]) == 11
    with problem("--ckpt-step 7 … global_step1299 … 290", CheckpointError):
        job.resume("--ckpt-step", "7")


def test_ckpt_step_of_a_damaged_checkpoint_is_an_error(job):
    job.save(5)
    job.save(10)
    (job.directory / "global_step10" / "weights.pt").unlink()
    with problem("--load … intact … global_step10", WrongCheckpointError):
        job.resume("--ckpt-step", "10")


def test_a_replaced_checkpoint_is_restored_unless_another_run_writes(job, tmp_path):
    job.save(5)
    (job.directory / "global_step5").rename(job.directory / "replaced-global_step5")
    reads = ["--save", str(tmp_path / "elsewhere")]
    with sole_writer(job.plan), problem("--load … no complete checkpoint", CheckpointError):
        job.resume(*reads)
    assert job.resume(*reads).iteration == 5


def test_a_read_only_load_directory_suffices_unless_a_rename_is_needed(job, tmp_path, os_calls):
    job.save(5)
    job.save(10)
    replaced = job.directory / "replaced-global_step10"
    replaced.mkdir()
    for call in ("rename", "rmdir"):
        os_calls(call, errno.EROFS)
    reads = ["--save", str(tmp_path / "elsewhere")]
    assert job.resume(*reads).iteration == 10
    (job.directory / "global_step10").replace(replaced)
    with problem("Read-only file system", WrongCheckpointError):
        job.resume(*reads)


def test_another_network_is_refused_before_anything_is_loaded(job):
    job.save(5)
    with problem("--num-layers  2 … 4", CheckpointError):
        job.resume("--num-layers", "4")
    assert job.engine.loaded == []


def test_a_run_beyond_the_decay_of_the_checkpoint_is_warned(job, messages):
    job.save(5)
    job.resume("--train-iters", "5", "--use-checkpoint-opt_param-scheduler")
    assert not [text for text in messages if "decays to 0" in text]
    job.resume("--train-iters", "900", "--use-checkpoint-opt_param-scheduler")
    assert [text for text in messages if "decays to 0 after" in text and "trains for 1800" in text]


def test_a_refusal_has_the_spelling_that_was_read_as_the_flag_that_it_names():
    words = ["--attention-backend", "flash", "--seed", "1", "--mock-data"]
    sized = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "11"]
    with pytest.raises(ConfigError) as caught:
        train_from(tiny_argv(*words, *sized, without=("--data-path",)), "gpt", description=None)
    *problems, last = caught.value.problems
    assert [each for each in problems if each.startswith("--attention-impl flash ")]
    assert last == "--attention-backend flash: read as --attention-impl flash"


def test_the_embedding_has_a_rate_of_its_own_where_the_schedule_of_the_checkpoint_has_one(job):
    job.save(5)
    flags = ["--decoupled-lr", "0.1", "--use-checkpoint-opt_param-scheduler"]
    with problem("--decoupled-lr … --override-opt_param-scheduler", CheckpointError):
        job.resume(*flags)
    assert job.engine.loaded == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layers", "4"], "--num-layers  2 … 4"),
        (["--bf16"], "--bf16, --fp16 … fp32 … bf16"),
        (["--optimizer", "sgd"], "--optimizer … adam … sgd"),
    ],
)
def test_a_wrong_load_is_refused_before_data_and_network_are_built(
    job, monkeypatch, flags, message
):
    job.save(5)

    def too_late(*words):
        raise AssertionError("something was built before")

    for name in ("build_process_groups", "read_datasets", "build_engine"):
        monkeypatch.setattr(pretrain.setup, name, too_late)
    words = dict.fromkeys(("padding_counts", "tokenizer", "kernels", "device"))
    words["objective"] = GPT()
    words["watchdog"] = Watchdog(FailureFile(""), rank=0)
    with problem(message, CheckpointError):
        pretrain._build(tiny_plan(*job.flags, *flags), **words)


def test_another_sample_order_is_refused_before_loading(job):
    job.save(5)
    other = (*job.flags, "--sample-order", "megatron-core", "--override-opt_param-scheduler")
    with problem("--sample-order bigscience … --finetune", WrongCheckpointError):
        choose_checkpoint(tiny_plan(*other))
    assert choose_checkpoint(tiny_plan(*other, "--finetune", "--save", "elsewhere"))
    assert choose_checkpoint(tiny_plan(*other, "--eval-only"))


def of_plugin(job, section, **choices):
    """Rewrite the manifest of step 5 as one of a run with a plugin's part."""
    folder = job.directory / "global_step5"
    manifest = read_manifest(folder)
    manifest.config["plugins"]["plugin"] = ["own_parts"]
    manifest.config[section].update(choices)
    write_manifest(folder, manifest)


@pytest.mark.parametrize(
    ("section", "choice", "flags", "is_refused"),
    [
        ("plugins", {"dataset": "backwards"}, [], True),
        ("schedule", {"lr_decay_style": "stairs"}, [], True),
        ("schedule", {"lr_decay_style": "stairs"}, ["--override-lr-scheduler"], False),
        ("plugins", {"dataset": "backwards"}, ["--finetune", "--save", "elsewhere"], False),
        ("model", {"activation": "mish"}, ["--finetune", "--save", "elsewhere"], True),
        ("plugins", {"hook": ["notes"]}, [], False),
    ],
)
def test_a_run_without_the_plugin_of_its_checkpoint_is_refused(
    job, section, choice, flags, is_refused
):
    job.save(5)
    of_plugin(job, section, **choice)
    if not is_refused:
        assert job.resume(*flags).iteration in (0, 5)
        return
    with problem("global_step5 … --plugin own_parts", WrongCheckpointError) as error:
        job.resume(*flags)
    assert error.value.exit_code == ExitCode.MISUSED
    assert next(iter(choice.values())) in str(error.value)


def test_lost_hooks_and_metrics_are_listed(job, messages):
    job.save(5)
    folder = job.directory / "global_step5"
    manifest = read_manifest(folder)
    manifest.plan["plugins"].update(hooks=["notes"], metrics=["tokens"])
    write_manifest(folder, manifest)
    job.resume()
    (settings,) = [text for text in messages if "other settings" in text]
    assert "--hook" in settings and "notes" in settings and "--metric" in settings


def test_flags_that_only_a_plugin_knows_name_the_plugin_of_the_checkpoint(job):
    job.save(5)
    of_plugin(job, "schedule", lr_decay_style="stairs")
    argv = ["--load", str(job.directory), "--lr-decay-style", "stairs"]
    with problem("--lr-decay-style stairs … --plugin") as error:
        train_from(argv, "gpt", description="")
    assert "--plugin own_parts" in str(error.value)
