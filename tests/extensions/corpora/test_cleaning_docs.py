"""The page about cleaning: its commands make of its crawl what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_the_commands_of_the_page_clean_its_crawl(tmp_path, read):
    page = (REPOSITORY / "docs" / "cleaning.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "tools").symlink_to(REPOSITORY / "tools")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "clean_urls.txt").read_text().splitlines()) == 24
    documents = read("corpus.json")
    # 20 and the two pieces of the one that held a question.
    assert [int(document["url"].rpartition("/")[2]) for document in documents] == [
        *range(20),
        21,
        21,
    ]
    assert [document["adlr_id"] for document in documents] == [f"web-{i:010d}" for i in range(22)]
    assert not any("seven bridges" in document["text"] for document in documents)
    assert {document.get("split_id") for document in documents} == {
        None,
        "lambada-0000000020-0000",
        "lambada-0000000020-0001",
    }
    # One command makes the same of them.
    cleaned = sorted((tmp_path / "web.cleaning" / "cleaned").glob("*.jsonl"))
    assert len(cleaned) == 3
    joined = b"".join(path.read_bytes() for path in cleaned)
    assert joined == (tmp_path / "decontaminated.json").read_bytes()
    assert (tmp_path / "web_text_document.idx").exists()
