"""The scripts of examples/ that pretrain a T5."""

from pathlib import Path

from example_scripts import SMALL, example
from jobs import journal
from sentence_corpora import write_sentences, write_vocabulary


def test_a_t5_is_divided_over_processes(tmp_path: Path) -> None:
    write_sentences(tmp_path / "sentences", [6] * 400, [*range(0, 401, 4)])
    vocab = write_vocabulary(tmp_path / "bert-vocab.txt")
    layout = {"GPUS_PER_NODE": "2", "TENSOR_PARALLEL": "1", "PIPELINE_PARALLEL": "2"}
    sizes = {"KV_CHANNELS": "8", "FFN_HIDDEN_SIZE": "64", "DECODER_SEQ_LENGTH": "16"}
    own = {**SMALL, **layout, **sizes, "PRECISION": "--bf16", "VOCAB_FILE": vocab}
    data = str(tmp_path / "sentences")
    example("pretrain_t5_distributed_with_mp.sh", tmp_path, **own, DATA_PATH=data)
    steps = journal(tmp_path / "checkpoints", "train")
    assert [step["iteration"] for step in steps] == [1, 2]
