"""Running the blocks of a page as their reader would."""

from pathlib import Path

from jobs import REPOSITORY, start
from pages_of_docs import Block, blocks_of
from ports import free_port
from quick_python import write_launchers


def run_page(page: Path, folder: Path) -> str:
    """Run all blocks of a page that are in bash; return what they print."""
    return "".join(execute(block, folder) for block in blocks_of(page, "bash"))


def execute(block: Block, folder: Path) -> str:
    """Run a block, on a port that other jobs of this machine do not use; return what it prints."""
    port = str(free_port())
    launchers = write_launchers(folder / ".launchers", port=port)
    script = f'set -euo pipefail\nPATH="{launchers}:$PATH"\n{block.text}'
    done = start("bash", "-c", script, cwd=folder, PET_MASTER_PORT=port)
    where = f"{block.page.relative_to(REPOSITORY)}, line {block.line}"
    assert done.codes == [0], f"{where}:\n{block.text}\n{done.outputs[0]}"
    return done.outputs[0]
