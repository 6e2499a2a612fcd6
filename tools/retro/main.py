#!/usr/bin/env python
"""Older name of tools/retro/preprocess_data.py."""

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    run_path(str(Path(__file__).with_name("preprocess_data.py")), run_name="__main__")
