"""A path that is no pair of token files: the error names the pairs that may be meant."""

from pathlib import Path

import pytest

from megatron.common.errors import DataError
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter
from megatron.data.token_files.legacy_indexed_dataset import open_token_files


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
    with pytest.raises(DataError, match=r"did you mean .*/my \[corpus\]_text_document\?$"):
        open_token_files(tmp_path / f"my [corpu]_text_document{suffix}", impl)
    with pytest.raises(DataError, match="without its suffix$"):
        open_token_files(tmp_path / "other", impl)
    with pytest.raises(DataError, match="--conversations makes them, for --data-path .*/other$"):
        open_token_files(tmp_path / "other_tokens_document", impl)
