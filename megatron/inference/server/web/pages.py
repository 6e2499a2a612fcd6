"""HTML pages of the server, one for each kind of model."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from megatron.common.web_page import web_page

_NUMBER = 'type="number" min="0"'


def _read(name: str) -> str:
    return files("megatron.inference.server.web").joinpath(name).read_text(encoding="utf-8")


def _page(
    title: str, hint: str, action: str, fields: Sequence[tuple[str, str, str]], script: str
) -> str:
    """Return a page with a prompt, settings and the text of the answer.

    Args:
        hint: label of the prompt.
        action: label of the button.
        fields: name, label and HTML attributes of each setting, a field of the request.
        script: JavaScript in addition to page.js.
    """
    inputs = [
        f'<label>{label} <input id="{name}" data-field="{name}" {attributes}></label>'
        for name, label, attributes in fields
    ]
    body = Template(_read("page.html")).substitute(
        hint=escape(hint),
        action=action,
        fields="\n    ".join(inputs),
        script=f"{_read('page.js')}\n{script}",
    )
    return web_page(title, body, style=_read("page.css"))


def _texts_page(title: str, path: str, hint: str, fields: Sequence[tuple[str, str, str]]) -> str:
    """Return a page that sends several texts to a path and shows the results together."""
    script = f"const PATH = {json.dumps(path)};\n{_read('texts.js')}"
    return _page(title, hint, "Send", fields, script)


GENERATION_PAGE = _page(
    "Text generation",
    "Prompt",
    "Generate",
    [
        ("max_tokens", "Max tokens", 'type="number" min="1" value="64"'),
        ("temperature", "Temperature", f'{_NUMBER} max="100" step="any" value="1"'),
        ("top_p", "Top p", f'{_NUMBER} max="1" step="any" value="1"'),
        ("top_k", "Top k", f'{_NUMBER} max="1000" placeholder="all"'),
        ("seed", "Seed", f'{_NUMBER} placeholder="random"'),
        ("stop", "Stop at", 'placeholder="nothing"'),
    ],
    _read("generation.js"),
)
FILL_MASK_PAGE = _texts_page(
    "Fill-mask",
    "fill-mask",
    "Texts, one a line: with [MASK], or without to score them",
    [("top", "Candidates", 'type="number" min="1" max="1000" value="5"')],
)
TEXT_TO_TEXT_PAGE = _texts_page(
    "Text to text",
    "text-to-text",
    "Texts, one a line; <extra_id_0>, <extra_id_1> and so on stand for spans to fill in",
    [
        ("max_new_tokens", "Max tokens", 'type="number" min="1"'),
        ("temperature", "Temperature", f'{_NUMBER} max="100" step="any"'),
        ("top_k", "Top k", f'{_NUMBER} max="1000"'),
        ("top_p", "Top p", f'{_NUMBER} max="1" step="any"'),
        ("seed", "Seed", f'{_NUMBER} placeholder="random"'),
        ("beam_width", "Beams", 'type="number" min="1" placeholder="none"'),
    ],
)
