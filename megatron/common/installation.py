"""Programs as this installation starts them: scripts of a checkout, or commands of an installed package.

Help and messages name scripts by their paths in the repository, requirements by their files, and a
launch by `deepspeed --num_gpus N …`; in_this_installation() writes what can be typed here.
"""

import re
import sys
from pathlib import Path

from megatron.common.commands import NAMES, program

ROOT = Path(__file__).resolve().parents[2]
"""The repository, or the site-packages of an installed package."""

_LAUNCH = re.compile(r"(deepspeed --num_gpus \w+) …")
_SCRIPT = re.compile(
    r"(?P<launch>deepspeed --num_gpus \w+ )?(?P<python>python3? )?"
    r"\b(?P<path>(?:tools|tasks)/[\w/]+|(?:pretrain|finetune)_\w+)\.py\b"
)
_REQUIREMENTS = re.compile(r"(?:--requirement|-r) requirements(?:-(\w+))?\.txt")


def is_installed() -> bool:
    """Whether the package is installed without its repository."""
    return not (ROOT / "pyproject.toml").exists()


def in_this_installation(text: str) -> str:
    """Return `text` with programs, launches and requirements as they are typed in this installation."""
    started = _launch_target()
    text = _LAUNCH.sub(rf"\1 {started} …", text) if started else text
    if not is_installed():
        return text
    return _REQUIREMENTS.sub(_extra, _SCRIPT.sub(_installed_name, text))


def _launch_target() -> str:
    """Return a launcher's arguments that start this program; "" for programs such as a notebook."""
    if module := NAMES.get(program()):
        return f"--module {module}"
    file = Path(sys.argv[0]).resolve()
    if not file.is_relative_to(ROOT) or file.suffix != ".py":
        return ""
    path = file.relative_to(ROOT)
    if is_installed():
        own = path.parts[0].startswith("megatron_") or len(path.parts) == 1
        return f"--module {'.'.join(path.with_suffix('').parts)}" if own else ""
    own = path.parts[0] in ("tools", "tasks") or len(path.parts) == 1
    return sys.argv[0] if own else ""


def _installed_name(match: re.Match[str]) -> str:
    module = match["path"].replace("/", ".")
    if "." in module:
        module = f"megatron_{module}"
    if match["launch"]:
        return f"{match['launch']}--module {module}"
    by_module = {each: command for command, each in NAMES.items()}
    return by_module.get(module, f"python -m {module}")


def _extra(match: re.Match[str]) -> str:
    return f'"megatron-deepspeed[{match[1]}]"' if match[1] else "megatron-deepspeed"
