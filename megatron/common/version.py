"""The version of this package and of what it writes to disk."""

from pathlib import Path

VERSION = "1.1.0"
CHECKPOINT_FORMAT = 3

_SOURCE = Path(__file__).resolve().parents[2]


def commit(source: Path = _SOURCE) -> str:
    """Return the git commit of the source, with "-dirty" if files differ from it."""
    # Elsewhere git would describe a repository around the installed package.
    if not (source / ".git").exists():
        return ""
    import subprocess  # milliseconds, which every start of a tool would take

    words = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(
            [*words, "--exclude=*"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
