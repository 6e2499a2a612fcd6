"""The scripts of examples/ that pretrain a BERT."""

from pathlib import Path

from example_scripts import SMALL, example
from jobs import journal
from sentence_corpora import write_sentences, write_vocabulary


def test_a_bert_is_divided_over_processes(tmp_path: Path) -> None:
    write_sentences(tmp_path / "sentences", [6] * 400, [*range(0, 401, 4)])
    vocab = write_vocabulary(tmp_path / "bert-vocab.txt")
    layout = {"GPUS_PER_NODE": "2", "TENSOR_PARALLEL": "2", "PIPELINE_PARALLEL": "1"}
    own = {**SMALL, **layout, "PRECISION": "--bf16", "VOCAB_FILE": vocab}
    data = str(tmp_path / "sentences")
    example("pretrain_bert_distributed_with_mp.sh", tmp_path, **own, DATA_PATH=data)
    steps = journal(tmp_path / "checkpoints", "train")
    assert [step["iteration"] for step in steps] == [1, 2]
    assert all(0.5 < step["sop_loss"] < 1.5 for step in steps)


def test_a_bert_is_planned(tmp_path: Path) -> None:
    wanted = {"DATA_PATH": "none", "PLAN": "--vocabulary 30524 --gpu a100-80gb"}
    printed = example("pretrain_bert_distributed.sh", tmp_path, **wanted).outputs[0]
    assert "parameters: 336,297,858 |" in printed
