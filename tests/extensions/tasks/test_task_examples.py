"""The scripts of examples/ that finetune a BERT."""

from pathlib import Path

import pytest
from example_scripts import SMALL, example
from jobs import journal
from labelled_files import write_mnli, write_race, write_relations, write_vocabulary


@pytest.mark.parametrize(("task", "processes"), [("mnli", "2"), ("race", "1")])
def test_a_bert_is_finetuned(tmp_path: Path, task: str, processes: str) -> None:
    write_vocabulary(tmp_path / "bert-vocab.txt")
    for name, seed in (("train.tsv", 0), ("dev_matched.tsv", 1), ("dev_mismatched.tsv", 2)):
        write_mnli(tmp_path / "MNLI" / name, 33, seed=seed)
    for name, seed in (("train/middle", 0), ("dev/middle", 1), ("dev/high", 2)):
        write_race(tmp_path / "RACE" / name, 16, seed=seed)
    own = {**SMALL, "GPUS_PER_NODE": processes, "PRECISION": "--bf16", "EPOCHS": "1"}
    own["PRETRAINED_CHECKPOINT"] = "none"
    flags = ["--pretrained-checkpoint", ""]  # from initial weights
    example(f"finetune_{task}_distributed.sh", tmp_path, *flags, **own)
    sets = {record["set"] for record in journal(tmp_path / "checkpoints", "task")}
    expected = {"mnli": {"dev-matched", "dev-mismatched"}, "race": {"dev-middle", "dev-high"}}
    assert sets == expected[task] | {"overall"}


def test_relations_are_learned(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocab.txt")
    for name, seed in (("train.tsv", 0), ("dev.tsv", 1)):
        write_relations(tmp_path / name, 32, seed=seed)
    own = {**SMALL, "PRECISION": "--bf16", "EPOCHS": "1", "PRETRAINED_CHECKPOINT": "none"}
    flags = ["--pretrained-checkpoint", ""]  # from initial weights
    example("finetune_relations.sh", tmp_path, *flags, **own)
    (overall,) = (r for r in journal(tmp_path / "checkpoints", "task") if r["set"] == "overall")
    assert {"accuracy", "relation precision", "relation recall", "relation f1"} <= {*overall}
