#!/usr/bin/env python
"""Take screenshots of the server's page and the run report of a real run, with Chromium."""

import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # the driver of Chromium

from browser import Page, browser
from PIL import Image

from megatron.common.cli import ToolParser, run_tool

ROOT = Path(__file__).resolve().parents[2]
VIEWS = {"light": ("light", 900), "dark": ("dark", 900), "phone": ("dark", 360)}
"""Colour scheme and width of each picture, by the end of its file's name."""

_COLOURS = 128  # of a picture: enough for texts and curves, and a small file
_HEIGHT = 1000
_START_S = 300.0


def main(argv: Sequence[str]) -> None:
    """Write the pictures."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--load", type=Path, required=True, help="directory of a GPT's run")
    parser.add_argument("--output", type=Path, required=True, help="folder of the PNG files")
    parser.add_argument("--prompt", default="def hello_world():")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder, browser(Path(folder) / "profile") as page:
        report = Path(folder) / "report.html"
        tool = [sys.executable, str(ROOT / "tools" / "watch.py"), str(args.load)]
        subprocess.run([*tool, "--html", str(report)], check=True)
        show_run_report(page, report, args.output)
        with serving(args.load) as address:
            show_server_page(page, address, args.prompt, args.output)


@contextmanager
def serving(load: Path) -> Iterator[str]:
    """Serve the model of a run; yield the server's address."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tool = str(ROOT / "tools" / "run_text_generation_server.py")
    flags = ["--load", str(load), "--micro-batch-size", "1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, tool, *flags])
    try:
        ends_at = monotonic() + _START_S
        while not _is_ready(port):
            if server.poll() is not None or monotonic() > ends_at:
                raise TimeoutError(f"the server of {load} has not started")
            sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health"):
            return True
    except URLError:
        return False


def show_server_page(page: Page, address: str, prompt: str, output: Path) -> None:
    """Take the pictures of the server's page with the continuation of `prompt`."""
    page.open(address)
    settings = {"prompt": prompt, "max_tokens": "40", "temperature": "0.8", "top_p": "0.9"}
    for field, value in {**settings, "seed": "1"}.items():
        page.type(field, value)
    page.click("go")
    page.wait_for("document.getElementById('status').textContent.startsWith('done')")
    take(page, output, "server_page")


def show_run_report(page: Page, report: Path, output: Path) -> None:
    """Take the pictures of a run report."""
    page.open(report.as_uri())
    take(page, output, "run_report")


def take(page: Page, output: Path, name: str) -> None:
    """Write the pictures output/NAME_VIEW.png of the page, down to `_HEIGHT`."""
    output.mkdir(parents=True, exist_ok=True)
    for view, (scheme, width) in VIEWS.items():
        page.show_as(scheme, width, _HEIGHT)
        height = page.value("document.querySelector('main').offsetHeight")
        page.show_as(scheme, width, min(height, _HEIGHT))
        with Image.open(io.BytesIO(page.picture())) as picture:
            colours = picture.convert("RGB").quantize(_COLOURS)
            colours.save(output / f"{name}_{view}.png", optimize=True)


if __name__ == "__main__":
    run_tool(main)
