"""The documentation's site is built without warnings, with a page for every page of docs/."""

import os
import subprocess
import sys

import pytest
from jobs import REPOSITORY

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_IN_FULL": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_navigation(site):
    docs = REPOSITORY / "docs"
    pages = [page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")]
    home = (site / "index.html").read_text(encoding="utf-8")
    for name in (*pages, "contributing", "changelog"):
        assert (site / f"{name}.html").is_file()
        assert f'href="{name}.html"' in home


def test_a_page_of_a_folder_links_to_pages_beside_and_above_it(site):
    page = (site / "recipes" / "chat.html").read_text(encoding="utf-8")
    assert 'href="continue_llama.html"' in page
    assert 'href="../serving.html#operation"' in page


def test_the_reference_has_the_docstrings(site):
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert "megatron.api.pretrain" in api
    packages = {init.parent.name for init in (REPOSITORY / "megatron").glob("*/__init__.py")}
    assert packages <= {page.stem for page in (site / "reference").glob("*.html")}
