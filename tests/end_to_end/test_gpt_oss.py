"""gpt-oss by Megatron-LM's flags: trained, continued in other layouts, generated from, exported and imported."""

import shutil
from pathlib import Path

import pytest
from jobs import Corpus, losses, start_ranks, tool

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48"),
    *("--num-attention-heads", "4", "--kv-channels", "16"),
    *("--group-query-attention", "--num-query-groups", "2", "--normalization", "RMSNorm"),
    *("--untie-embeddings-and-output-weights", "--attention-backend", "fused"),
    *("--softmax-type", "learnable", "--window-size", "7,0", "--window-attn-skip-freq", "2"),
    *("--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "7.0"),
    *("--position-embedding-type", "rope", "--rotary-base", "150000", "--rotary-percent", "1.0"),
    *("--use-rope-scaling", "--rope-scaling-type", "yarn", "--rope-scaling-factor", "4"),
    *("--rope-original-max-position-embeddings", "16", "--no-rope-truncation"),
    *("--num-experts", "4", "--moe-ffn-hidden-size", "48", "--moe-router-topk", "2"),
    *("--moe-router-score-function", "softmax", "--moe-router-linear-bias", "--moe-grouped-gemm"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-router-dtype", "fp32", "--moe-token-dispatcher-type", "alltoall"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--seq-length", "32", "--max-position-embeddings", "64", "--pad-vocab-size-to", "512"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "3e-3", "--train-iters", "8"),
    *("--log-interval", "1", "--eval-iters", "0", "--save-interval", "3"),
]


def test_it_trains_moves_generates_and_is_exported(corpus: Corpus, tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    flags = [*RUN, *corpus.flags]
    tensor = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    start_ranks(2, *flags, *tensor, "--save", str(whole)).succeeded()
    expected = losses(whole)
    assert expected[-1] < expected[0] - 0.1

    paths = ["--save", str(moved), "--load", str(moved)]
    for number, layout in (
        (3, ["--pipeline-model-parallel-size", "2"]),
        (6, ["--context-parallel-size", "2", "--expert-model-parallel-size", "2"]),
    ):
        shutil.rmtree(moved, ignore_errors=True)
        shutil.copytree(whole / f"global_step{number}", moved / f"global_step{number}")
        start_ranks(2, *flags, *paths, *layout).succeeded()
        assert losses(moved) == pytest.approx(expected[number:], rel=1e-5)

    words = ["--load", str(moved), "--prompt", "import", "--greedy", "--out-seq-length", "20"]
    (generated,) = tool("tools/generate_samples_gpt.py", *words).succeeded().outputs
    exported, back = tmp_path / "hf", tmp_path / "back"
    folder = "tools/convert_checkpoint"
    (shown,) = (
        tool(f"{folder}/to_hf.py", "--load", str(moved), "--save", str(exported))
        .succeeded()
        .outputs
    )
    assert "GptOssForCausalLM in fp32" in shown
    tool(f"{folder}/from_hf.py", "--load", str(exported), "--save", str(back)).succeeded()
    words[1] = str(back)
    (again,) = tool("tools/generate_samples_gpt.py", *words).succeeded().outputs
    assert again.splitlines()[-1] == generated.splitlines()[-1]
