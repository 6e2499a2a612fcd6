"""Tools that show data, on samples of T5."""

import pytest
from data_tools import output, write_run_of_sentences


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_run_of_sentences()


def test_samples_of_t5_are_shown_as_encoder_and_decoder(sentences):
    run = f"--objective t5 {sentences} --decoder-seq-length 16 --sample-id-range 0 2"
    lines = output("sample_idxs_to_text.py", run)
    assert [line.split()[:2] for line in lines] == [
        ["0", "encoder:"],
        ["0", "decoder:"],
        ["1", "encoder:"],
        ["1", "decoder:"],
    ]
    assert lines[1].startswith("0 decoder: [BOS] <extra_id_0> ")
    # Sentinels are there by default, and token files made without them fit.
    assert "<extra_id_0>" in lines[0]
