"""What tests of token files share."""

import pytest

from megatron.data.token_files import index_files


@pytest.fixture
def small_chunks(monkeypatch):
    """Indexes are handled two entries at a time."""
    monkeypatch.setattr(index_files, "CHUNK", 2)
