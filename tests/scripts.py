"""Scripts that are no modules, imported and run all the same."""

import importlib.util
import io
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from source import REPOSITORY

from megatron.common.cli import run_tool


def module_of(file):
    spec = importlib.util.spec_from_file_location(f"tool_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool_at(script):
    """Return the module of a script, by its path in the repository."""
    return module_of(REPOSITORY / script)


def run_script(script, *words, folder="."):
    """Run a tool in this process; return its exit code and what it wrote, as of a process.

    Args:
        script: its path in the repository.
        folder: the working directory.
    """
    out, err, handler, here = (
        io.StringIO(),
        io.StringIO(),
        signal.getsignal(signal.SIGTERM),
        os.getcwd(),
    )
    os.chdir(folder)
    try:
        with (
            patch.object(sys, "argv", [str(REPOSITORY / script), *map(str, words)]),
            patch.object(sys, "path", [*sys.path]),
            redirect_stdout(out),
            redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            run_tool(tool_at(script).main)
    finally:
        os.chdir(here)
        signal.signal(signal.SIGTERM, handler)
    code = int(ended.value.code or 0)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def forget_plugin(module, registry, part):
    """Forget a plugin's module, and the part that it has registered."""
    sys.modules.pop(module, None)
    registry._entries.pop(part, None)


PROGRAMS = tool_at("tools/make_flags_page.py").PROGRAMS
"""Programs with the sections of flags that they take."""
