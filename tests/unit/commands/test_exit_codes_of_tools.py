"""One rule for every tool: exit code 2 for what another attempt would meet again, else 1."""

import errno
import json
import re
import signal

import pytest
from scripts import tool_at

from megatron.common.cli import run_tool
from megatron.common.errors import BusyError, CheckpointError, DataError, UnreadableCheckpointError

GPT2 = "--tokenizer-type GPT2BPETokenizer"
BPE = f"{GPT2} --vocab-file vocab.json --merge-file merges.txt"
TEXT = "--input corpus.jsonl --output-prefix out"

NEAR = "did you mean nones?"

MISTAKES = [
    ("tools/preprocess_data.py", f"--input none.jsonl --output-prefix out {BPE}", "none.jsonl"),
    (
        "tools/preprocess_data.py",
        f"{TEXT} {GPT2} --vocab-file none --merge-file merges.txt",
        "none",
    ),
    ("tools/preprocess_data.py", f"{TEXT} {GPT2} --vocab-file vocab.json", "--merge-file"),
    (
        "tools/preprocess_data.py",
        f"{TEXT} {GPT2} --vocab-file merges.txt --merge-file vocab.json",
        "swap",
    ),
    ("tools/preprocess_data.py", f"{TEXT} {BPE} --json-keys content", "'content'"),
    ("tools/preprocess_data.py", f"--input bad.jsonl --output-prefix out {BPE}", "bad.jsonl"),
    ("tools/preprocess_data.py", f"--input corpus.jsonl --output-prefix nodir/out {BPE}", "nodir"),
    ("tools/preprocess_data_many_cores.py", f"--input none --output-prefix out {BPE}", "none"),
    ("tools/train_tokenizer.py", "--input none.jsonl --output made", "none.jsonl"),
    ("tools/train_tokenizer.py", "--input bad.jsonl --output made", "bad.jsonl"),
    (
        "tools/train_tokenizer.py",
        "--input corpus.jsonl --output . --vocab-size 9",
        "--vocab-size 9",
    ),
    ("tools/train_tokenizer.py", "--input corpus.jsonl --output .", "--output . exists"),
    ("tools/merge_preprocessed_data.py", "--datasets none --output-prefix all", "none"),
    ("tools/inspect_data.py", "none", "none"),
    ("tools/inspect_data.py", "broken", "broken"),
    ("tools/build_index.py", "--seq-length 8 --micro-batch-size 1 --train-iters 1", "--data-path"),
    ("tools/plan.py", "--num-layers 2", "--hidden-size"),
    ("tools/make_ds_config.py", "--num-layers 2", "--hidden-size"),
    ("tools/watch.py", "none", NEAR),
    ("tools/why_step.py", "3 --load none", NEAR),
    ("tools/tb/rebuild.py", "--load none --tensorboard-dir new", NEAR),
    (
        "tools/convert_checkpoint/ds_to_universal.py",
        "--input_folder none --output_folder new",
        NEAR,
    ),
    ("tools/convert_checkpoint/inspect_checkpoint.py", "none", NEAR),
    ("tools/checkpoint/inspect.py", "none", NEAR),
    ("tools/checkpoint/digest.py", "none", NEAR),
    ("tools/checkpoint/upcycle.py", "--load none --save new --num-experts 4 --topk 2", NEAR),
    ("tools/checkpoint/util.py", "--model-type GPT --load-dir none --save-dir new", NEAR),
    ("tools/merge_mp_partitions.py", "--model-type GPT --load none", "none"),
    ("tools/convert_checkpoint/to_hf.py", "--load none --save new", NEAR),
    (
        "tools/convert_checkpoint/to_hf.py",
        "--load model --save new",
        "Hugging Face's format already",
    ),
    ("tools/convert_checkpoint/from_hf.py", "--load none --save new", NEAR),
    ("tools/convert_checkpoint/lora_to_peft.py", "--load none --save new", "none"),
    ("tools/generate_samples_gpt.py", "--prompt a", "--load"),
    ("tools/generate_samples_gpt.py", "--prompt a --load none", NEAR),
    ("tools/run_text_generation_server.py", "--load none", "none"),
    ("tasks/main.py", "--task LAMBADA --valid-data none --load none", "none"),
    ("tasks/main.py", "--task RACE --valid-data none --load none", "--num-layers"),
    ("tasks/main.py", "--train-data none --epochs 1", "--task is required"),
    ("tasks/token_classification.py", "model.optim.lrr=1", "did you mean model.optim.lr?"),
    ("tasks/text_classification.py", "do_training=false pretrained_model=none", "none"),
    ("tasks/question_answering.py", "model.validation_ds=none", "model.validation_ds.file=none"),
    ("tasks/eval_harness/evaluate.py", "--task_list lambada --load none", "none"),
    (
        "examples/detxoify_lm/generate_samples_gpt.py",
        "--load none --num-samples 1 --genfile f",
        "none",
    ),
    (
        "examples/detxoify_lm/annotations/perspective_api_annotate.py",
        "--data-path none --scorer a:b",
        "none",
    ),
    (
        "examples/detxoify_lm/annotations/filter-selfgeneration.py",
        "--data-path none --out-path f",
        "none",
    ),
    (
        "examples/detxoify_lm/perspective_api.py",
        "--data-path a --prompt-path b --scorer none",
        "none",
    ),
]


@pytest.fixture
def ending(tmp_path, monkeypatch, command_line, capsys):
    """Run a tool in this process; return its exit code and what it wrote to stderr."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "bad.jsonl").write_text("plain text\n")
    for suffix in ("bin", "idx"):
        (tmp_path / f"broken.{suffix}").write_bytes(b"garbage")
    (tmp_path / "nones").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def end(main, words=""):
        command_line("tool.py", *words.split())
        with pytest.raises(SystemExit) as caught:
            run_tool(main)
        return caught.value.code, capsys.readouterr().err

    yield end
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("script", "words", "named"), MISTAKES)
def test_what_another_attempt_would_meet_again_is_2(ending, script, words, named, tmp_path):
    code, output = ending(tool_at(script).main, words)
    assert code == 2
    assert output.startswith("error: ")
    assert named in output
    assert not re.search(r"Traceback|\[Errno", output)
    assert not (tmp_path / "new").exists()


# Those first look at flags that they cannot do without.
NEEDY = {"tools/why_step.py", "tools/tb/rebuild.py", "tasks/main.py"}


@pytest.mark.parametrize("script", sorted({script for script, *_ in MISTAKES} - NEEDY))
def test_a_wrong_flag_is_2_and_named(ending, script):
    code, output = ending(tool_at(script).main, "--no-such-flag=1")
    assert (code, "no-such-flag" in output) == (2, True), output


def failing(error, cause=None):
    def main(argv):
        raise error from cause

    return main


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DataError("cannot write a.bin"), OSError(errno.ENOSPC, "No space left on device")),
        (DataError("cannot read a.bin"), OSError(errno.EIO, "Input/output error")),
        (CheckpointError("cannot write"), OSError(errno.EDQUOT, "Disk quota exceeded")),
        (BusyError("another process writes to out.stage"), BlockingIOError()),
        (UnreadableCheckpointError("no permission"), None),
    ],
)
def test_what_may_pass_is_1(ending, error, cause):
    assert ending(failing(error, cause)) == (1, f"error: {error}\n")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DataError("cannot write a.bin"), OSError(errno.EROFS, "Read-only file system")),
        (DataError("a.bin is truncated"), None),
        (CheckpointError("the manifest is damaged"), ValueError("not JSON")),
    ],
)
def test_what_will_not_pass_is_2(ending, error, cause):
    assert ending(failing(error, cause)) == (2, f"error: {error}\n")
