"""HTML pages of the server, one for each kind of model."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

_KEY = '<label>API key <input id="key" type="password" autocomplete="off"></label>'


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _page(title: str, body: str) -> str:
    """Return a page: the head that all share, and `body`."""
    head = Template(_read("page_head.html")).substitute(title=escape(title))
    return f"{head}{body}</body>\n</html>\n"


def _form_page(title: str, path: str, hint: str, fields: Sequence[tuple[str, str, str]]) -> str:
    """Return a page with a form for the texts and number fields of a path.

    Args:
        fields: name, label and HTML attributes of each.
    """
    inputs = [
        f'<label>{label} <input data-field="{name}" type="number" {attributes}></label>'
        for name, label, attributes in fields
    ]
    parts = {"path": path, "hint": escape(hint), "fields": "\n    ".join([*inputs, _KEY])}
    return _page(title, Template(_read("form_page.html")).substitute(parts))


GENERATION_PAGE = _page("Text generation", _read("generation_page.html"))
FILL_MASK_PAGE = _form_page(
    "Fill-mask",
    "fill-mask",
    "Texts, one a line: with [MASK], or without to score them",
    [("top", "Candidates", 'min="1" max="1000" value="5"')],
)
TEXT_TO_TEXT_PAGE = _form_page(
    "Text to text",
    "text-to-text",
    "Texts, one a line; <extra_id_0>, <extra_id_1> and so on stand for spans to fill in",
    [
        ("max_new_tokens", "New tokens", 'min="1"'),
        ("temperature", "Temperature", 'min="0" max="100" step="any"'),
        ("top_k", "Top k", 'min="0" max="1000"'),
        ("top_p", "Top p", 'min="0" max="1" step="any"'),
        ("seed", "Seed", 'min="0" placeholder="none"'),
        ("beam_width", "Beams", 'min="1" placeholder="none"'),
    ],
)
