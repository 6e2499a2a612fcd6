"""Tests of an extension import helpers of those that it needs."""

import sys
from pathlib import Path

sys.path += sorted(str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir())
