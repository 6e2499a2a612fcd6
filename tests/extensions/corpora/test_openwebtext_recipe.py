"""OpenWebText's chain in one command."""

import json
import os
import subprocess
import sys
from pathlib import Path

from texts import FRENCH, english

from megatron.data.token_files.indexed_dataset import IndexedDataset

SCRIPT = Path(__file__).parents[3] / "examples" / "corpora" / "openwebtext.sh"
QUESTION = " ".join(f"secret{i}" for i in range(13))


def run(folder, **variables):
    """Run the script with no variable of this process but PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT)],
        cwd=folder,
        env={"PATH": path, "OUT": "owt", **variables},
        capture_output=True,
        text=True,
    )


def test_pages_become_token_files_and_a_second_run_continues(tmp_path, write):
    from tokenizers import pre_tokenizers

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write("lambada.jsonl", [{"text": QUESTION}])
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "a.txt").write_text("http://example.org/1\nhttp://youtube.com/x\n")
    done = run(tmp_path, URLS="urls")
    assert (done.returncode, (tmp_path / "owt" / "urls.txt").read_text()) == (
        0,
        "http://example.org/1\n",
    )
    assert "run again with FETCH=1, or fetch the pages of owt/urls.txt" in done.stdout

    texts = [*map(english, range(5)), english(2) + " More.", FRENCH, "Short."]
    texts.append(f"{english(7)} {QUESTION}. {english(8)}")
    (tmp_path / "pages").mkdir()
    write("pages/a.json", [{"text": t, "url": f"http://a.org/{i}"} for i, t in enumerate(texts)])
    variables = {
        **{"PAGES": "pages", "VOCAB_FILE": "vocab.json", "MERGE_FILE": "merges.txt"},
        **{"LAMBADA": "lambada.jsonl", "WORKERS": "1", "LICENCE": "various", "DATE": "2026-01"},
    }
    done = run(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "owt" / "corpus.json").read_text()) == {
        "source": {"name": "OpenWebText", "date": "2026-01", "licence": "various"},
        "documents": {"merged": 9, "clean": 7, "unique": 6, "decontaminated": 7, "corpus": 7},
    }
    assert len(IndexedDataset(tmp_path / "owt" / "openwebtext_text_document")) == 7
    assert "secret" not in (tmp_path / "owt" / "corpus.jsonl").read_text()

    # With another threshold, and as after a kill: the steps that depend on it are done again.
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "owt").iterdir()}
    (tmp_path / "owt" / "corpus.jsonl").unlink()
    (tmp_path / "owt" / "openwebtext.stage").mkdir()
    variables |= {"THRESHOLD": "1.0", "WORKERS": "2"}
    done = run(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    again = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "owt").iterdir()}
    changed = {name for name in again if again[name] != written.get(name)}
    assert {"groups.jsonl", "unique.json", "decontaminated.json", "corpus.jsonl"} <= changed
    assert {"corpus.json", "openwebtext_text_document.idx"} <= changed
    assert not {"merged.json", "clean.json", "pairs.jsonl"} & changed
    report = json.loads((tmp_path / "owt" / "corpus.json").read_text())
    assert report["documents"]["unique"] == 7
    assert len(IndexedDataset(tmp_path / "owt" / "openwebtext_text_document")) == 8


def test_missing_pages_are_reported(tmp_path):
    done = run(tmp_path)
    assert done.returncode != 0
    assert "PAGES: set it to the folder of fetched pages" in done.stderr
