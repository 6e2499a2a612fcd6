"""A small corpus with its own byte-level BPE, made once."""

import json
from pathlib import Path

import pytest
from jobs import Corpus, tool
from tokenizers import ByteLevelBPETokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """This interpreter's json package and its neighbours, tokenized."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted(Path(json.__file__).parent.glob("*.py"))
    sources += sorted(Path(json.__file__).parents[1].glob("[a-c]*.py"))
    texts = [source.read_text(encoding="utf-8") for source in sources]
    text_file = folder / "corpus.jsonl"
    text_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=500, special_tokens=["<|endoftext|>"])
    trained.save_model(str(folder))
    vocab_file, merge_file = str(folder / "vocab.json"), str(folder / "merges.txt")
    tool(
        "tools/preprocess_data.py",
        *("--input", str(text_file), "--output-prefix", str(folder / "small")),
        *("--tokenizer-type", "GPT2BPETokenizer", "--append-eod"),
        *("--vocab-file", vocab_file, "--merge-file", merge_file),
    ).succeeded()
    return Corpus(str(folder / "small_text_document"), vocab_file, merge_file, str(text_file))
