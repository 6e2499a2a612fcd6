"""The page at / in a real browser; TEST_ARTIFACTS is the folder that its picture is kept in."""

import os
import re
import threading
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from servers import serving, until

from megatron.inference.server.web.pages import (
    FILL_MASK_PAGE,
    GENERATION_PAGE,
    TEXT_TO_TEXT_PAGE,
)

ARTIFACTS = Path(os.environ.get("TEST_ARTIFACTS") or Path(__file__).parents[3] / "artifacts")


@pytest.mark.parametrize("text", [GENERATION_PAGE, FILL_MASK_PAGE, TEXT_TO_TEXT_PAGE])
def test_a_page_has_what_its_script_uses_and_needs_nothing_of_other_servers(text):
    assert not re.search(r"https?:|//\w|src=|href=|innerHTML", text)
    used = set(re.findall(r'at\("([\w-]+)"\)', text))
    assert used <= set(re.findall(r'id="([\w-]+)"', text)) and "model" in used
    inputs = re.findall(r"(.*)<(?:input|textarea) (.*?)>", text)
    assert all("<label" in before or 'id="prompt"' in given for before, given in inputs)


STATUS = "document.getElementById('status').textContent"
TEXT = "document.getElementById('text').textContent"
FOCUS = "document.activeElement.id"


def keep(page, name):
    """Keep a picture of the page, which must fit into the width of its window."""
    assert page.overflow() <= 0
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    picture = page.picture()
    assert picture.startswith(b"\x89PNG")
    (ARTIFACTS / name).write_bytes(picture)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at")
def test_a_prompt_is_continued_before_the_eyes(group, tmp_path):
    with serving(group, api_key="sesame") as running, browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{running.port}/")
        page.wait_for(f"{FOCUS} == 'key'")  # shown because the server needs one
        page.type("prompt", "<b>Once</b>")
        page.click("go")
        page.wait_for(f"{STATUS}.startsWith('The API key is missing')")
        page.type("key", "wrong")
        page.press("Enter")
        page.wait_for(f"{STATUS}.startsWith('The API key is wrong')")

        request = {"prompt": "<b>Once</b>", "max_tokens": 24, "temperature": 0.7, "seed": 3}
        full = running.send(
            "POST", "/v1/completions", {"model": "tiny", **request}, Authorization="Bearer sesame"
        ).json["choices"][0]["text"]
        page.type("key", "sesame")
        for field in ("max_tokens", "temperature", "seed"):
            page.type(field, str(request[field]))
        page.value(
            "seen = new Set(); new MutationObserver(() => seen.add("
            "document.getElementById('text').textContent)).observe("
            "document.getElementById('text'), {childList: true, subtree: true}); 1"
        )
        page.press("Enter", modifiers=2)
        page.wait_for(f"{STATUS}.startsWith('done')")
        assert page.value(STATUS).endswith(": 24 tokens; the limit of tokens is reached")
        assert page.value(TEXT) == request["prompt"] + full
        assert page.value("seen.size") > 3
        assert page.value("document.getElementById('model').textContent") == "tiny"
        page.click("copy")
        page.wait_for(f"{STATUS} == 'copied'")
        for scheme, width in (("light", 900), ("dark", 360)):
            page.show_as(scheme, width)
            keep(page, f"text-generation-{scheme}-{width}.png")

        page.type("stop", full[1:3])
        page.click("go")
        page.wait_for(f"{STATUS}.startsWith('done') && {STATUS}.endsWith('; the text ended')")
        assert page.value(f"{TEXT}.length") < len(request["prompt"] + full)

        page.type("max_tokens", "49")
        page.click("go")
        page.wait_for(f"{STATUS}.includes('49')")
        assert page.value("document.getElementById('status').className") == "bad"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at")
def test_the_keyboard_stops_the_generation_on_the_server(group, tmp_path):
    with serving(group) as running, browser(tmp_path) as page:
        loop, turns = running.served.engine_thread, threading.Semaphore(8)
        step = loop.engine.step
        loop.engine.step = lambda: step() if turns.acquire(timeout=60) else []
        page.open(f"http://127.0.0.1:{running.port}/")
        order = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "go"]
        for name in order:
            assert page.value(FOCUS) == name
            page.press("Tab")
        request = {"prompt": "<b>Once</b>", "max_tokens": 48, "temperature": 0.7, "seed": 3}
        for field, value in request.items():
            page.type(field, str(value))
        page.value("document.getElementById('go').focus()")
        page.press("Enter")
        page.wait_for(f"{TEXT}.length > 13")
        assert page.value(FOCUS) == "halt"
        page.press("Escape")
        page.wait_for(f"{STATUS}.startsWith('stopped')")
        assert page.value(FOCUS) == "go"
        turns.release(100)
        until(lambda: loop.num_running == 0)
        assert 1 <= loop.num_tokens < 40
        running.server.stop()
        page.click("go")
        page.wait_for(f"{STATUS}.match(/connection to the server is lost|shutting down/)")
