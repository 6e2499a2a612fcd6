"""A prefix without token files: the error names the pairs with the nearest names."""

from pathlib import Path

import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter, open_token_files


@pytest.mark.parametrize("impl", ["infer", "mmap", "cached"])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_the_prefix_of_preprocessing_is_no_pair_but_those_it_made_are_named(tmp_path, impl, suffix):
    prefix = tmp_path / "my [corpus]"
    for name in ("text_document", "title_document", "text_sentence"):
        with IndexedDatasetWriter(f"{prefix}_{name}", "u2") as writer:
            writer.append([1])
    Path(f"{prefix}_title_document.bin").unlink()
    with pytest.raises(DataError) as error:
        open_token_files(f"{prefix}{suffix}", impl)
    message = str(error.value)
    assert message.startswith(f"no token files at {prefix}{suffix}: ")
    assert message.endswith(f"did you mean {prefix}_text_document or {prefix}_text_sentence?")
    with problem("my [corpu] … did you mean … /my [corpus]_text_document?", DataError):
        open_token_files(tmp_path / f"my [corpu]_text_document{suffix}", impl)
    with pytest.raises(DataError, match="other.*suffix$"):
        open_token_files(tmp_path / "other", impl)
    with problem("other.idx … no folder … /missing", DataError):
        open_token_files(tmp_path / "missing" / "other", impl)
    with pytest.raises(DataError, match="--conversations .* --data-path .*/other$"):
        open_token_files(tmp_path / "other_tokens_document", impl)


@pytest.mark.parametrize(
    "prefix",
    [
        *("corpus", "corpus_text", "corpus_document", "corpus.jsonl", "corpus_text_sentence"),
        *("corpus_text_document.bin", "Corpus_text_document", "corpus_txt_document", "../pairs/"),
    ],
)
def test_a_near_miss_names_the_pair(tmp_path, monkeypatch, prefix):
    (tmp_path / "pairs").mkdir()
    monkeypatch.chdir(tmp_path / "pairs")
    with IndexedDatasetWriter("corpus_text_document", "u2") as writer:
        writer.append([1])
    with problem("suffix … corpus_text_document?", DataError):
        open_token_files(prefix)
