"""Files that pin an interface: what is written there may change only on purpose."""

import os
from pathlib import Path

HERE = Path(__file__).parent / "golden"


def require_golden(name: str, text: str) -> None:
    """Compare `text` with the file `name`; with WRITE_GOLDEN=1 in the environment, write it."""
    file = HERE / name
    if os.environ.get("WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), (
        f"{name} pins an interface that others rely on; if it shall change, run again with "
        "WRITE_GOLDEN=1 and look at the difference"
    )
