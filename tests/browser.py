"""A headless Chromium, driven over its pipe (Chrome DevTools Protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any

from PIL import Image
from source import REPOSITORY

ARTIFACTS = Path(os.environ.get("TEST_ARTIFACTS") or Path(__file__).parent / "artifacts")
"""Folder of the pictures that tests take."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
_START_S = 120


class Page:
    """The one page of a browser."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._held = b""
        self._number = 0
        self._session: str | None = None
        (target,) = (
            found
            for found in self._send("Target.getTargets")["targetInfos"]
            if found["type"] == "page"
        )
        options = {"targetId": target["targetId"], "flatten": True}
        self._session = self._send("Target.attachToTarget", **options)["sessionId"]

    def open(self, address: str) -> None:
        self._send("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return what JavaScript makes of an expression."""
        options = {"expression": expression, "returnByValue": True}
        found = self._send("Runtime.evaluate", **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        for _ in range(1200):
            if self.value(condition):
                return
            time.sleep(0.025)
        raise AssertionError(f"never so: {condition}; the page: {self.value(_TEXT)}")

    def type(self, element: str, text: str) -> None:
        """Replace what is in an input by what a keyboard writes."""
        self.value(f"document.getElementById('{element}').select()")
        self._send("Input.insertText", text=text)

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """Press and release a key, such as Escape; modifiers: 2 is Ctrl."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        options = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self._send("Input.dispatchKeyEvent", type="keyDown", **options, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", **options)

    def show_as(self, scheme: str, width: int, height: int = 800) -> None:
        """Show the page with light or dark colours in a window of this size."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send("Emulation.setEmulatedMedia", features=features)
        self._send("Emulation.setScrollbarsHidden", hidden=True)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)

    def overflow(self) -> int:
        """Return the pixels by which the page is wider than the window."""
        return self.value("document.documentElement.scrollWidth - innerWidth")

    def click(self, element: str) -> None:
        index = self.value(
            f"(() => {{ const r = document.getElementById('{element}').getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        mouse = {"x": index[0], "y": index[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, **mouse)

    def picture(self) -> bytes:
        return base64.b64decode(self._send("Page.captureScreenshot")["data"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reported = self._receive()
            if reported.get("id") == self._number:
                assert "result" in reported, reported
                return reported["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], _START_S)
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser says nothing"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)


_TEXT = "document.body.innerText"


def take(name: str, **values: Any) -> None:
    """Take the pictures NAME_VIEW.png by the documentation's tool; check them and those of docs/.

    Args:
        values: arguments of the tool's function show_NAME.
    """
    tool = run_path(str(REPOSITORY / "tools" / "docs" / "screenshots.py"))
    tool[f"show_{name}"](**values, output=ARTIFACTS)
    for view, (_, width) in tool["VIEWS"].items():
        for folder in (ARTIFACTS, REPOSITORY / "docs"):
            file = folder / f"{name}_{view}.png"
            assert file.stat().st_size < 150_000
            with Image.open(file) as picture:
                assert picture.width == width and 300 < picture.height <= 1000
                counts = sorted((n for n, _ in picture.convert("RGB").getcolors()), reverse=True)
                assert len(counts) > 10 and sum(counts[1:]) > sum(counts) / 50


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Run a browser whose files are in `profile`."""
    assert CHROMIUM, "there is no browser"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-dev-shm-usage", "--remote-debugging-pipe", "--window-size=900,800"]
    # The browser reads file 3 and writes file 4.
    connected = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'
    process = subprocess.Popen(
        ["sh", "-c", connected, "sh", *command, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin and process.stdout
    try:
        yield Page(process.stdin.fileno(), process.stdout.fileno())
    finally:
        process.stdin.close()
        process.stdout.close()
        process.terminate()
        process.wait(_START_S)
