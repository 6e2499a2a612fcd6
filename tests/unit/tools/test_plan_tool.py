"""The planner as it is typed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from problems import require_problem
from scripts import run_script

REPOSITORY = Path(__file__).resolve().parents[3]
NETWORK = (
    *("--num-layers", "24", "--hidden-size", "2048", "--num-attention-heads", "16"),
    *("--seq-length", "2048", "--global-batch-size", "512", "--train-iters", "1000"),
)


def run(*flags, bits="--bf16"):
    return run_script("tools/plan.py", *NETWORK, bits, *flags)


def test_a_run_is_planned_to_its_cost():
    done = run(
        *("--num-gpus", "16", "--tensor-model-parallel-size", "2", "--micro-batch-size", "4"),
        *("--device=h100-80gb", "--mfu", "0.4", "--price-per-gpu-hour", "3"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "16 processes = tp 2 * pp 1 * sp 1 * dp 8 | ZeRO stage 1 | bf16" in done.stdout
    assert [line for line in lines if line.startswith("stage 0 (24 layers, embedding, head;")]
    assert [line for line in lines if line.startswith("h100-80gb: fits")]
    assert "MFU: 40.0% (causal attention: 3" in done.stdout
    assert "times are from --mfu 0.4" in lines
    assert " | cost: " in lines[-1]


def test_larger_micro_batches_that_pay_are_named():
    small = run("--num-gpus", "8", "--gpu", "h100-80gb")
    assert small.returncode == 0, small.stderr
    (line,) = [x for x in small.stdout.splitlines() if x.startswith("larger micro-batches pay: ")]
    size, saved = re.search(
        r"--micro-batch-size (\d+) fits too, and shortens a step by (\d+)%", line
    ).groups()
    large = run("--num-gpus", "8", "--gpu", "h100-80gb", "--micro-batch-size", size)
    before, after = (float(re.search(r"step: ([0-9.]+) to", x.stdout)[1]) for x in (small, large))
    assert after / before == pytest.approx(1 - int(saved) / 100, abs=0.01)
    assert "larger micro-batches" not in large.stdout


@pytest.mark.parametrize(("heads", "ffn"), [(32, 16384), (128, 65536)], ids=["3B", "11B"])
def test_the_published_sizes_of_t5_are_planned(heads, ffn):
    """Sizes of arXiv:1910.10683, section 3.7, with the biases and norms of Megatron-LM."""
    done = run(
        *("--objective", "t5", "--num-layers", "24", "--hidden-size", "1024"),
        *("--num-attention-heads", str(heads), "--kv-channels", "128"),
        *("--ffn-hidden-size", str(ffn), "--seq-length", "512", "--decoder-seq-length", "128"),
        *("--vocabulary", "29184", "--num-gpus", "64", "--tensor-model-parallel-size", "4"),
        *("--gpu", "a100-80gb"),
    )
    assert done.returncode == 0, done.stderr
    h, a = 1024, heads * 128
    attention, mlp, norm = 3 * (h * a + a) + a * h + h, h * ffn + ffn + ffn * h + h, 2 * h
    layers = 24 * (3 * attention + 2 * mlp + 5 * norm)
    count = 29184 * (h + 1) + 512 * h + layers + 2 * norm
    assert f"parameters: {count:,} |" in done.stdout


def test_times_in_fp8_are_said_to_be_those_of_bf16():
    flags = ("--num-gpus", "8", "--gpu", "h100-80gb")
    plain, fp8 = run(*flags), run(*flags, "--fp8-format", "hybrid", "--compile")
    assert fp8.returncode == 0, fp8.stderr
    assert "--fp8-format is not estimated: times are those of bf16" in fp8.stdout
    assert "fp8" not in plain.stdout


def test_a_search_ends_in_flags_to_take():
    done = run("--search", "16", "--device", "h100-80gb", "--show", "3")
    assert done.returncode == 0, done.stderr
    assert "flags of the first: --tensor-model-parallel-size" in done.stdout
    assert "times are from a roofline: no run of this program has been measured" in done.stdout
    assert "do not run (tp 16): more than the 8 GPUs of a node" in done.stdout


def test_a_search_takes_a_schedule_of_batch_sizes():
    words = [*NETWORK[:-4], "--train-samples", "100", "--bf16", "--gpu", "h200", "--search", "8"]
    done = run_script(
        "tools/plan.py", *words, "--step-batch-size-schedule", "0:4 20480:8", "--show", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "flags of the first: " in done.stdout
    (first,) = (line for line in done.stdout.splitlines() if line.startswith("1. "))
    replicas, micro = re.search(r" dp (\d+) .* micro-batch (\d+) ", first).groups()
    assert 4 % (int(replicas) * int(micro)) == 0


def test_a_price_is_reckoned_for_the_layouts_of_a_search():
    done = run("--search", "8", "--gpu", "h200", "--show", "1", "--price-per-gpu-hour", "3")
    assert done.returncode == 0, done.stderr
    (first,) = (line for line in done.stdout.splitlines() if line.startswith("1. "))
    found = re.search(r"GPU hours: (\d+) to (\d+) \| cost: (\d+) to (\d+)$", first).groups()
    least, most, least_cost, most_cost = map(int, found)
    assert (least_cost / least, most_cost / most) == pytest.approx((3, 3), rel=0.3)


def test_what_may_make_a_run_fit_is_named_unless_it_is_given():
    sizes = ("--num-gpus", "8", "--gpu", "a100-40gb", "--micro-batch-size", "64")
    last = "; --bf16, --zero-stage 1 may make it fit, or --search 8 looks for a layout that fits"
    assert run(*sizes, bits="--seed=1").stdout.splitlines()[-1].endswith(last)
    given = run(*sizes, "--zero-stage", "1", bits="--bf16").stdout.splitlines()[-1]
    assert given.endswith("can use; --search 8 looks for a layout that fits")


def test_the_number_of_gpus_has_a_flag():
    require_problem("--gpus … write --num-gpus N", [run("--gpus", "64").stderr])


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (("--num-gpus", "8", "--micro-batch-size", "64"), "does not run on v100-32gb: needs more"),
        (("--search", "1", "--hidden-size", "8192"), "no layout can be run"),
    ],
)
def test_what_does_not_fit_has_no_time_and_fails(flags, last):
    done = run(*flags, "--gpu", "v100-32gb", bits="--fp16")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].startswith(last)
    assert "GPU hours" not in done.stdout


def test_a_network_by_name_has_its_vocabulary():
    words = [sys.executable, str(REPOSITORY / "tools" / "plan.py"), "--preset", "llama-2-7b"]
    words += ["--global-batch-size", "8", "--train-iters", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert "parameters: 6,738,415,616 |" in done.stdout
    done = subprocess.run(
        [*words, "--vocabulary", "50257"], capture_output=True, text=True, timeout=100
    )
    assert "parameters: 6,888,361,984 |" in done.stdout


def test_the_vocabulary_is_that_of_the_file(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2}))
    (tmp_path / "merges.txt").write_text("")
    files = [f"--vocab-file={tmp_path / 'vocab.json'}", f"--merge-file={tmp_path / 'merges.txt'}"]
    done = run(*files)
    assert done.returncode == 0, done.stderr
    assert " | vocabulary: 3 tokens" in done.stdout
    assert "assumed" not in done.stdout
    assert "a vocabulary of 50,257 tokens is assumed" in run().stdout


def test_flags_of_another_type_of_tokenizer_are_left_out_with_a_notice(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2}))
    (tmp_path / "merges.txt").write_text("")
    files = [f"--vocab-file={tmp_path / 'vocab.json'}", f"--merge-file={tmp_path / 'merges.txt'}"]
    done = run(*files, "--tiktoken-pattern", "v2")
    assert done.returncode == 0, done.stderr
    notice = "--tiktoken-pattern has no effect without --tokenizer-type TikTokenizer"
    assert done.stdout.count(notice) == 1


def test_weighted_data_need_not_be_there():
    done = run("--num-gpus", "8", "--train-weighted-split-paths", "ALL: 1 0:0.9 nowhere")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "h1000"), "h1000 is not one of v100-16gb"),
        (("--mfu", "2", "--gpu", "h200"), "--mfu 2 must be more than 0 and at most 1"),
        (("--price-per-gpu-hour", "2"), "give --gpu too"),
        (("--measured", "results.json"), "give --gpu too"),
        (("--measured", "nowhere.json", "--gpu", "h200"), "--measured nowhere.json cannot be read"),
        (("--measured", "r.json", "--mfu", "0.4", "--gpu", "h200"), "leave one out"),
        (("--search", "0"), "--search 0 must be at least 1"),
        (("--search", "8", "--num-gpus", "4"), "leave --num-gpus or --world-size out"),
        (
            ("--num-gpus", "3", "--tensor-model-parallel-size", "2"),
            "a multiple of 2 processes, got 3; write --num-gpus 2 or 4",
        ),
        (
            ("--search", "8", "--zero-stage", "1", "--sequence-parallel"),
            "--search decides --sequence-parallel, --zero-stage itself",
        ),
        (("--search", "8", "--train-samples", "10"), "give exactly one of --train-iters"),
        (("--search", "8", "--gas", "4"), "give --global-batch-size in place of --gradient-acc"),
        (("--search", "8", "--gpu", "v100-16gb"), "v100-16gb has no bf16"),
        (("--search", "8", "--deepspeed_config", "x.json"), "leave --deepspeed_config out"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_torch_nor_deepspeed_is_imported():
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['plan.py', *{NETWORK!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(REPOSITORY / 'tools' / 'plan.py')!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        "assert not {'torch', 'deepspeed', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=100)
