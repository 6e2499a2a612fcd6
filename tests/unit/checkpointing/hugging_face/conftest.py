"""Exports of small checkpoints."""

import pytest
from architectures import export_to


@pytest.fixture
def exported(group, tmp_path):
    return export_to(group, tmp_path)
