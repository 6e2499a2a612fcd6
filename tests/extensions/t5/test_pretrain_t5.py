"""pretrain_t5.py trains, and goes on as if it had never stopped, also in another layout."""

from pathlib import Path

from jobs import tool
from objective_runs import require_resharded, sentence_flags, trained_and_resumed

T5 = [
    *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-split-rank", "1"),
    *("--bf16", "--zero-stage", "1"),
]


def test_t5(tmp_path: Path) -> None:
    flags = [*sentence_flags(tmp_path), "--decoder-seq-length", "16"]
    save = trained_and_resumed("pretrain_t5.py", 2, [*flags, *T5], tmp_path)
    flags += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"]
    require_resharded("pretrain_t5.py", flags, save, tmp_path)
    words = ["--load", str(save), "--greedy", "--text", "w6 w7 <extra_id_0> w9"]
    (output,) = tool("tools/text_to_text.py", *words).succeeded().outputs
    assert "\n  filled: w6 w7 " in output
