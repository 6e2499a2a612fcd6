"""Scripts that are no modules, imported all the same."""

import importlib.util
import sys

from source import REPOSITORY


def module_of(file):
    spec = importlib.util.spec_from_file_location(f"tool_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool_at(script):
    """Return the module of a script, by its path in the repository."""
    return module_of(REPOSITORY / script)


PROGRAMS = tool_at("tools/make_flags_page.py").PROGRAMS
"""Programs with the sections of flags that they take."""
