"""A mistake ends every rank with one message, a non-zero code, and nothing half-written."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from jobs import PRETRAIN, Corpus, launched, start, start_ranks, tool

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--lr", "1e-3", "--train-iters", "4", "--eval-iters", "0", "--save-interval", "2"),
]


def fails(ranks: int, code: int, *expected: str, flags: list[str], save: Path) -> str:
    """Return the output of rank 0 when the run with `flags` was refused."""
    done = start_ranks(ranks, *flags, "--save", str(save))
    assert done.codes == [code] * ranks, "\n".join(done.outputs)
    assert not any(
        "Traceback" in printed or "ended without a message" in printed for printed in done.outputs
    )
    assert done.outputs[0].count("error:") == 1
    for text in expected:
        assert text in done.outputs[0]
    assert not list(save.glob("*global_step*"))
    return done.outputs[0]


def test_every_violation_is_listed_at_once(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    fails(
        2,
        2,
        "--num-attention-heads 5 is not a multiple of --tensor-model-parallel-size 2",
        "--hidden-size 32 is not a multiple of --num-attention-heads 5",
        "--max-position-embeddings 8 is less than --seq-length 32",
        "--fp16 needs a GPU",
        "--zero-stage 7 is not one of 0, 1, 2, 3",
        "--min-lr 1.0 is more than --lr",
        flags=[
            *RUN,
            *corpus.flags,
            *("--num-attention-heads", "5", "--tensor-model-parallel-size", "2", "--fp16"),
            *("--max-position-embeddings", "8", "--zero-stage", "7", "--min-lr", "1"),
            *("--deepspeed_config", str(tmp_path / "ds.json"), "--device", "cpu"),
        ],
        save=tmp_path / "save",
    )


def test_json_that_contradicts_a_flag_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    fails(
        1,
        2,
        "gradient_clipping is 0.5, but --clip-grad is 1.0",
        flags=[*RUN, *corpus.flags, "--deepspeed_config", str(tmp_path / "ds.json")],
        save=tmp_path / "save",
    )


def test_a_truncated_token_file_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    prefix = tmp_path / "short"
    shutil.copy(corpus.prefix + ".idx", f"{prefix}.idx")
    Path(f"{prefix}.bin").write_bytes(Path(corpus.prefix + ".bin").read_bytes()[:-10])
    fails(
        2,
        2,
        f"{prefix}.bin",
        flags=[*RUN, *corpus.flags, "--data-path", str(prefix)],
        save=tmp_path / "save",
    )


def test_a_directory_without_checkpoint_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails(
        2,
        2,
        f"--load {tmp_path / 'empty'} holds no complete checkpoint",
        flags=[*RUN, *corpus.flags, "--load", str(tmp_path / "empty")],
        save=tmp_path / "save",
    )


def test_a_vocabulary_without_merges_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    flags = [*RUN, "--data-path", corpus.prefix, "--vocab-file", corpus.vocab_file]
    fails(1, 2, "--merge-file", flags=flags, save=tmp_path / "save")


def test_the_launcher_passes_the_message_and_the_code_on(tmp_path: Path) -> None:
    done = launched(2, *RUN, "--hiden-size", "32", "--save", str(tmp_path / "save"))
    assert done.codes != [0]
    assert (
        done.outputs[0].count("error: unknown flag --hiden-size; did you mean --hidden-size?") == 1
    )
    assert "Traceback" not in done.outputs[0]
    assert not (tmp_path / "save").exists()


def test_torchs_launcher_names_the_message_as_the_root_cause() -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", PRETRAIN)
    ended = start(sys.executable, *words, "--num-layer", "2", "--device", "cpu")
    assert ended.codes == [1]
    cause = ended.outputs[0].partition("Root Cause (first observed failure)")[2]
    assert "traceback : error: " in cause, ended.outputs[0]
    assert "did you mean --num-layers?" in cause
    assert "To enable traceback" not in ended.outputs[0]


@pytest.mark.parametrize(
    ("damage", "output"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda folder: flip(folder / "mp_rank_00_model_states.pt"), "is damaged: its hash"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    damage, output: str, corpus: Corpus, tmp_path: Path
) -> None:
    flags = [*RUN, *corpus.flags, "--save", str(tmp_path)]
    start_ranks(1, *flags).succeeded()
    damage(tmp_path / "global_step4")
    again = start_ranks(1, *flags, "--load", str(tmp_path)).succeeded()
    assert output in again.outputs[0]
    assert "successfully loaded checkpoint" in again.outputs[0]
    assert "at iteration 2" in again.outputs[0]
    assert not list(tmp_path.glob("staging-*"))


def test_a_directory_that_is_another_on_every_rank_is_refused(
    corpus: Corpus, tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    done = start_ranks(
        2, *RUN, *corpus.flags, "--save", "runs", folders=[tmp_path / "0", tmp_path / "1"]
    )
    assert done.codes == [1, 1]
    assert "--save runs is not the same directory for all ranks" in done.outputs[0]
    assert "for ranks [1]" in done.outputs[0]
    assert not list(tmp_path.glob("*/runs/global_step*"))


def test_generation_refuses_damaged_weights(corpus: Corpus, tmp_path: Path) -> None:
    start_ranks(1, *RUN, *corpus.flags, "--save", str(tmp_path)).succeeded()
    flip(tmp_path / "global_step4" / "mp_rank_00_model_states.pt")
    done = tool("tools/generate_samples_gpt.py", "--load", str(tmp_path), "--prompt", "x")
    assert done.codes == [2]
    assert "is damaged: its hash" in done.outputs[0]


def test_another_network_is_refused_with_all_differences(corpus: Corpus, tmp_path: Path) -> None:
    flags = [*RUN, *corpus.flags]
    start_ranks(1, *flags, "--save", str(tmp_path)).succeeded()
    options = ["--num-layers", "3", "--ffn-hidden-size", "16", "--bf16"]
    both = ["--load", str(tmp_path), "--save", str(tmp_path)]
    done = start_ranks(1, *flags, *options, *both)
    assert done.codes == [2]
    assert not (tmp_path / "failure.json").exists()
    for difference in (
        "--num-layers +2 +3\n",
        "--ffn-hidden-size +128 +16\n",
        "--bf16, --fp16 +fp32 +bf16\n",
    ):
        assert re.search(difference, done.outputs[0])
    assert "after dataloaders are built" not in done.outputs[0]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
