"""The picture of the packages in docs/architecture.md: drawn from the imports."""

from floors import packages_as_mermaid
from golden_files import require_golden
from source import REPOSITORY


def test_the_page_of_the_architecture_draws_the_packages():
    page = REPOSITORY / "docs" / "architecture.md"
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- packages -->\n")
    _, end, after = rest.partition("<!-- /packages -->")
    drawn = f"```mermaid\n{packages_as_mermaid()}\n```\n"
    require_golden("../../docs/architecture.md", before + start + drawn + end + after)
