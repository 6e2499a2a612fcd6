"""tools/inspect_data.py, on documents of sentences."""

import numpy as np
import pytest
from data_tools import output, write_run_of_sentences
from sentence_corpora import thousand_documents


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_run_of_sentences()


def test_sentences_of_a_document_are_shown_apart(sentences):
    lines = output("inspect_data.py", "sentences --documents 2 --max-tokens 60")
    of_documents = [line for line in lines if line.startswith("document ")]
    sizes, starts = thousand_documents()
    assert of_documents[0] == "document 0: 0 tokens: "
    total = sizes[starts[1] : starts[2]].sum()
    shown = of_documents[1].partition(f"document 1: {total} tokens: ")[2]
    assert len(shown.partition(" ... ")[0].replace("| ", "").split()) == 60
    assert shown.count(" | ") == np.searchsorted(np.cumsum(sizes[starts[1] : starts[2]]), 60)
    assert shown.endswith(f"... {total - 60} more")
    unused = next(line for line in lines if line.startswith("sentences: "))
    assert "44 without a sentence, 44 with fewer sentences" in unused
