"""The page at / in a real browser; TEST_ARTIFACTS is the folder that its pictures are kept in."""

import re
import threading

import pytest
from browser import CHROMIUM, browser, take
from servers import serving, until

from megatron.inference.server.web.pages import (
    FILL_MASK_PAGE,
    GENERATION_PAGE,
    TEXT_TO_TEXT_PAGE,
)


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
            assert page.overflow() <= 0

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
        address = f"http://127.0.0.1:{running.port}/"
        take("server_page", page=page, address=address, prompt="<b>Once</b>")
        page.show_as("light", 900)
        loop, turns = running.served.engine_thread, threading.Semaphore(8)
        before = loop.num_tokens
        step = loop.engine.step

        def step_slowly():
            turns.acquire(timeout=0.5)  # the rest would take twenty seconds
            return step()

        loop.engine.step = step_slowly
        page.open(address)
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
        until(lambda: loop.num_running == 0)
        assert 1 <= loop.num_tokens - before < 48
        running.server.stop()
        page.click("go")
        page.wait_for(f"{STATUS}.match(/connection to the server is lost|shutting down/)")
