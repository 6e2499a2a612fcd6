"""Tools that show data, on samples of BERT and their index maps."""

import re

import pytest
from data_tools import output, run, write_run_of_sentences
from sentence_corpora import thousand_documents

from megatron.extensions.masked_lm.data_mapping import build_sentence_mapping


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_run_of_sentences()


def test_samples_of_bert_are_shown_with_their_masks(sentences):
    run = f"--objective bert {sentences} --data-cache-path ."
    lines = output("sample_idxs_to_text.py", f"{run} --sample-id-range 0 40 --print-text")
    assert len(lines) == 40
    assert all(re.match(r"\d+ \[CLS\]", line) for line in lines)
    assert {line.count("[SEP]") for line in lines} == {2}
    shown = re.findall(r"(\S+)\(((?:##)?w\d+)\)", "\n".join(lines))
    masked = [of for token, of in shown if token == "[MASK]"]
    assert 0.7 < len(masked) / len(shown) < 0.9
    assert any(token == of for token, of in shown)
    # Ids alone need no --print-text, but the tokenizer for the masks.
    (line,) = output("sample_idxs_to_text.py", f"{run} --sample-id-range 3 4 --print-tokens")
    assert re.match(r"3 2 .* 4 .* 3$", line)


def test_index_maps_of_sentences_are_built_ahead_and_documents_counted(sentences):
    lines = output("build_index.py", f"--objective bert {sentences} --split 8,1,1")
    sizes, starts = thousand_documents()
    mapping = build_sentence_mapping(
        sizes,
        starts[:801],
        num_samples=10,
        max_length=29,
        short_seq_prob=0.1,
        seed=1234,
        min_sentences=2,
    )
    counted = f"samples wanted: 10 | samples: {len(mapping.rows)}"
    assert lines[0] == f"training set train: {counted}"
    assert "documents: 800 |" in lines[1]
    assert "sentences: 10988" in "\n".join(output("inspect_data.py", "sentences --documents 2"))
    done = run("build_index.py", f"--objective bert {sentences} --data-path none")
    assert done.returncode != 0
