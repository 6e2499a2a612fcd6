"""A network from outside of megatron does what a GPT does, and is refused by name where it cannot."""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest
from jobs import REPOSITORY, Corpus, clean_environment, journal, losses, start_ranks, tool
from ports import free_port
from safetensors import safe_open

FILE = str(REPOSITORY / "examples/recurrent_network/recurrent_network.py")
PLUGIN = ("--plugin", FILE)
OWN_WEIGHT = "layers.0.mixer.decay"
PROMPT = "def main("
GENERATE = ("--out-seq-length", "8", "--greedy")


def flags_of(corpus: Corpus) -> list[str]:
    return [
        *PLUGIN,
        *("--network", "recurrent", "--attention-every", "2"),
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
        *("--seq-length", "32", "--max-position-embeddings", "32"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "3"),
        *("--hidden-dropout", "0", "--attention-dropout", "0"),
        *("--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0", "--device", "cpu"),
        *corpus.flags,
    ]


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of one rank."""
    save = tmp_path_factory.mktemp("recurrent") / "run"
    start_ranks(1, *flags_of(corpus), "--save", str(save)).succeeded()
    return save


def generated(folder: Path) -> str:
    """Return what a checkpoint writes."""
    file = folder.with_suffix(".jsonl")
    prompts = folder.with_suffix(".txt")
    prompts.write_text(f"{PROMPT}\n")
    words = ["--load", str(folder), *PLUGIN, "--device", "cpu", *GENERATE]
    words += ["--sample-input-file", str(prompts), "--sample-output-file", str(file)]
    tool("tools/generate_samples_gpt.py", *words).succeeded()
    text: str = json.loads(file.read_text())["text"]
    return text


@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--tensor-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size", "2"],
    ],
    ids=["sequence", "tensor", "pipeline"],
)
def test_losses_are_those_of_one_rank(
    corpus: Corpus, trained: Path, tmp_path: Path, layout: list[str]
) -> None:
    start_ranks(2, *flags_of(corpus), *layout, "--save", str(tmp_path / "run")).succeeded()
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=1e-5)


def test_the_plan_counts_its_weights(trained: Path) -> None:
    (start,) = journal(trained, "start")
    manifest = json.loads((trained / "global_step3/manifest.json").read_text())
    assert manifest["plan"]["model"]["architecture"] == "recurrent"
    assert start["flags"]["--attention-every"] == 2


def test_it_is_resharded_generates_and_is_served(trained: Path, tmp_path: Path) -> None:
    text = generated(trained)
    words = [
        "--input_folder",
        str(trained / "global_step3"),
        "--output_folder",
        str(tmp_path / "two"),
    ]
    words += ["--target_tp", "2", *PLUGIN]
    tool("tools/convert_checkpoint/deepspeed_to_deepspeed.py", *words).succeeded()
    assert generated(tmp_path / "two") == text
    words = ["--load", str(trained), *PLUGIN, "--device", "cpu", "--micro-batch-size", "2"]
    with served(*words) as address:
        body = json.dumps({"prompts": [PROMPT], "tokens_to_generate": 8, "top_k": 1})
        request = urllib.request.Request(f"{address}/api", body.encode(), method="PUT")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            (answer,) = json.loads(reply.read())["text"]
    assert answer == PROMPT + text


@contextmanager
def served(*words: str) -> Iterator[str]:
    """Serve a checkpoint, and yield the server's address once it answers."""
    port = free_port()
    script = str(REPOSITORY / "tools/run_text_generation_server.py")
    command = [sys.executable, script, *words, "--host", "127.0.0.1", "--port", str(port)]
    process = Popen(command, env=clean_environment(), stdout=PIPE, stderr=STDOUT, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_it_is_exported_by_its_own_names(trained: Path, tmp_path: Path) -> None:
    words = ["--load", str(trained), "--save", str(tmp_path / "out"), *PLUGIN]
    tool("tools/convert_checkpoint/to_hf.py", *words, "--exporter", "safetensors").succeeded()
    (file,) = (tmp_path / "out").glob("*.safetensors")
    with safe_open(str(file), "pt") as tensors:
        assert tensors.get_slice(OWN_WEIGHT).get_shape() == [32]


@pytest.mark.parametrize(
    ("script", "words", "reason"),
    [
        ("tools/convert_checkpoint/to_hf.py", ["--save", "OUT"], "has no recurrent"),
        ("tools/fill_mask.py", ["--text", "a"], "a RECURRENT"),
        ("tools/text_to_text.py", ["--text", "a"], "a RECURRENT"),
    ],
)
def test_it_is_refused_by_name(
    trained: Path, tmp_path: Path, script: str, words: list[str], reason: str
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    done = tool(script, "--load", str(trained), *PLUGIN, *words)
    assert done.codes != [0] and reason in done.outputs[0]


def test_it_is_refused_without_its_plugin(trained: Path) -> None:
    done = tool("tools/generate_samples_gpt.py", "--load", str(trained), "--prompt", PROMPT)
    assert done.codes != [0] and "--plugin" in done.outputs[0]
