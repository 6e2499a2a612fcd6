"""Training of a vocabulary."""

import json

from scripts import run_script

from megatron.tokenizer.build import build_tokenizer


def test_a_trained_vocabulary_encodes_and_decodes(tmp_path):
    texts = ["the cat and the hat", "the other cat"] * 9
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("\n".join(texts))
    (tmp_path / "more" / "b.jsonl").write_text(json.dumps({"text": "ünïcode the end"}) + "\n")
    words = ("--input", "more", "--output", "made", "--vocab-size", "280")
    done = run_script("tools/train_tokenizer.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--vocab-file made/vocab.json" in done.stdout
    files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    paths = {name: str(tmp_path / "made" / file) for name, file in files.items()}
    tokenizer = build_tokenizer(tokenizer_type="GPT2BPETokenizer", **paths)
    assert tokenizer.vocab_size <= 280
    assert tokenizer.eod == 0
    assert len(tokenizer.encode("the cat the")) == 3
    assert tokenizer.decode(tokenizer.encode("ünïcode, 猫")) == "ünïcode, 猫"
    assert len(list((tmp_path / "made").iterdir())) == 2
    assert not (tmp_path / "made.unfinished").exists()


def test_inputs_without_text_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.txt").write_text("\n \n")
    words = ("--input", "empty.jsonl", "blank.txt", "--output", "made")
    done = run_script("tools/train_tokenizer.py", *words, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: the files of --input hold no text to train a vocabulary on\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blank.txt", "empty.jsonl"]
