"""The page at / in a real browser; TEST_ARTIFACTS is the folder that its picture is kept in."""

import os
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from servers import serving

from megatron.inference.server.pages import GENERATION_PAGE

ARTIFACTS = Path(os.environ.get("TEST_ARTIFACTS") or Path(__file__).parents[3] / "artifacts")


def test_the_page_needs_nothing_of_other_servers():
    text = GENERATION_PAGE
    assert "http:" not in text and "https:" not in text and "//" not in text
    assert "src=" not in text and "href=" not in text and "innerHTML" not in text


def test_every_element_that_the_script_uses_is_there():
    text = GENERATION_PAGE
    used = set(re.findall(r'at\("(\w+)"\)', text))
    assert used <= set(re.findall(r'id="(\w+)"', text)) and "model" in used
    assert "color-scheme: light dark" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at")
def test_a_prompt_is_continued_before_the_eyes(group, tmp_path):
    with serving(group, api_key="sesame") as running, browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{running.port}/")
        page.type("prompt", "<b>Once</b>")
        page.click("go")
        page.wait_for("document.getElementById('status').textContent.includes('API-KEY')")
        assert page.value("document.getElementById('status').className") == "error"

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
        page.click("go")
        page.wait_for("document.getElementById('status').textContent.startsWith('done')")
        assert page.value("document.getElementById('text').textContent") == request["prompt"] + full
        assert page.value("seen.size") > 3
        assert page.value("document.getElementById('model').textContent") == "tiny"
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        picture = page.picture()
        assert picture.startswith(b"\x89PNG")
        (ARTIFACTS / "text-generation-page.png").write_bytes(picture)

        page.type("stop", full[1:3])
        page.click("go")
        page.wait_for("document.getElementById('text').textContent.length > 0")
        page.wait_for("document.getElementById('status').textContent.startsWith('done (stop)')")
        assert page.value("document.getElementById('text').textContent.length") < len(
            request["prompt"] + full
        )
