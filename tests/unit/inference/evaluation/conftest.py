"""A folder of an untrained transformers model, which the tools of tasks/ evaluate."""

import pytest
from untrained import write_untrained


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """A folder of an untrained transformers model, its network and its tokenizer."""
    return write_untrained(tmp_path_factory.mktemp("theirs"))
