"""HTML pages without external resources, in one style: light and dark, from phones to desktops."""

from functools import cache
from html import escape
from importlib.resources import files


def web_page(title: str, body: str, *, style: str = "", policy: str | None = None) -> str:
    """Return an HTML page, which is well-formed XML if `body` is.

    Args:
        body: HTML of the page, with its scripts.
        style: CSS in addition to web_page.css, whose colours (--ink and so on) it can use.
        policy: Content-Security-Policy of a page that no server sends; None: no policy.
    """
    content = f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>\n' if policy else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>\n'
        f"{content}"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}{style}</style></head><body>\n"
        f"<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body></html>\n"
    )


@cache
def _style() -> str:
    return files("megatron.common").joinpath("web_page.css").read_text(encoding="utf-8")
