"""Scripts run by their name, from any directory."""

import os

import pytest
from source import REPOSITORY, SCRIPTS

ENTRIES = [file for file in SCRIPTS if "__main__" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", ENTRIES, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_a_script_is_executable_by_pythons_name(file):
    assert file.read_text(encoding="utf-8").startswith("#!/usr/bin/env python\n")
    assert os.access(file, os.X_OK)
