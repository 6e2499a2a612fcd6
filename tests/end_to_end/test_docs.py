"""What the documentation tells a user to type works, and what it points at exists."""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from jobs import REPOSITORY, journal, start
from pages_of_docs import DOCS, FENCE, PAGES, RECIPES, SCRIPTS, blocks_of, checkout, name_of
from run_blocks import run_page
from scripts import PROGRAMS

from megatron.config.config import parse_config
from megatron.config.parsing.declaration import flags_of

DATA_PAGE = DOCS / "data.md"
TROUBLE_PAGE = DOCS / "troubleshooting.md"
DATA_FILES = (
    "corpus.jsonl",
    "corpus_text_document.bin",
    "corpus_text_document.idx",
    "vocab.json",
    "merges.txt",
)
"""What the first block of DATA_PAGE makes, and the other pages use."""

_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_VARIABLES = re.compile(r"^(?:\w+=\$\()?(?:[A-Z_]+=\S* +)*")  # in front of a command
_PATH = re.compile(r"`((?:megatron|tasks|tools|examples|slurm|docs|tests)/[\w./-]*)`")


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where all blocks of DATA_PAGE have run."""
    folder = checkout(tmp_path_factory.mktemp("docs-data"))
    run_page(DATA_PAGE, folder)
    return folder


def with_bash_blocks() -> list[Path]:
    """Return the pages whose commands run here: not the recipes, which have tests of their own."""
    return [page for page in PAGES if page.parent != RECIPES and blocks_of(page, "bash")]


@pytest.mark.parametrize("page", with_bash_blocks(), ids=name_of)
def test_commands_run(page: Path, data_folder: Path, tmp_path: Path) -> None:
    if page == DATA_PAGE:
        return  # run by the fixture
    if page.name == "retro.md":
        pytest.importorskip("h5py")
    folder = checkout(tmp_path / "checkout")
    for name in DATA_FILES:
        shutil.copy(data_folder / name, folder)
    run_page(page, folder)
    if page.name == "finetuning.md":
        require_learned_answers(folder)
    if page.name == "text_tasks.md":
        require_learned_tasks(folder)


def require_learned_answers(folder: Path) -> None:
    """Answers that were held out are foretold better in the end than at first."""
    for save in ("tuned", "adapted"):
        held_out = [record["lm_loss"] for record in journal(folder / save, "evaluation")]
        assert held_out[-1] < held_out[0], (save, held_out)


def require_learned_tasks(folder: Path) -> None:
    """Each task is learned far above chance, and the best checkpoint predicts as it was scored."""
    least = {
        "entities": ("entity f1", 0.9),
        "sentences": ("accuracy", 0.8),
        "relations": ("relation f1", 0.9),
    }
    for save, (metric, score) in least.items():
        assert max(record[metric] for record in journal(folder / save, "task")) > score, save
    score = {
        save: json.loads((folder / save / "best" / "best.json").read_text())["score"]
        for save in ("entities", "relations")
    }
    labels = (folder / "entities" / "label_ids.csv").read_text()
    assert labels.split() == ["O", "B-LOC", "B-PER"]
    for save in ("predicted", "from-nemo"):
        (again, *_) = journal(folder / save, "task")
        tolerance = 0 if save == "predicted" else 0.1
        assert again["entity f1"] == pytest.approx(score["entities"], abs=tolerance)
    (again, *_) = journal(folder / "relations-from-nemo", "task")
    assert again["relation f1"] == pytest.approx(score["relations"], abs=0.1)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield place and words of each command in blocks that are shown and not run."""
    for block in (block for page in PAGES for block in blocks_of(page, "console")):
        for line in block.text.replace("\\\n", " ").splitlines():
            command = _VARIABLES.sub("", line).rstrip(")")
            if re.match(r"(bash|python|deepspeed|srun|sbatch)\b(?! -m pytest)", command):
                yield f"{name_of(block.page)}:{block.line}", shlex.split(command)


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=place) for place, words in shown_commands()]
)
def test_commands_that_are_only_shown_are_right(words: list[str], tmp_path: Path) -> None:
    if words[0] == "bash":
        assert start("bash", "-n", str(REPOSITORY / words[1])).codes == [0]
        return
    if any(f"{word}.py" in SCRIPTS for word in words):  # a module, of the installed package
        words = [f"{word}.py" if f"{word}.py" in SCRIPTS else word for word in words]
    words = [program_of(word) if word.endswith(".slurm") else word for word in words]
    script = next(i for i, word in enumerate(words) if word in (*SCRIPTS, *PROGRAMS))
    if words[script] not in SCRIPTS:
        output = {word.partition("=")[0] for word in words[script:] if word.startswith("--")}
        assert output <= options_of(words[script])
        return
    network = tmp_path / "network.yaml"
    network.write_text(
        "num-layers: 2\nhidden-size: 8\nnum-attention-heads: 2\nseq-length: 8\n"
        "micro-batch-size: 1\nlr: 0.1\n"
    )
    flags = [str(network) if word.endswith(".yaml") else word for word in words[script + 1 :]]
    parse_config(flags)


def program_of(batch_script: str) -> str:
    """Return the Python program that a batch script passes its words to."""
    text = (REPOSITORY / batch_script).read_text(encoding="utf-8")
    (program,) = re.findall(r"\$REPOSITORY/(\S+\.py)\"", text) or ["pretrain_gpt.py"]
    return program


def options_of(program: str) -> set[str]:
    """Return the flags of a tool."""
    return {
        option
        for section in PROGRAMS[program]
        for flag in flags_of(section)
        for option in flag.options
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = _LINK.findall(_CODE.sub("", text))
    missing = [file + place for file, place in links if not leads(page, file, place)]
    missing += [path for path in _PATH.findall(text) if not (REPOSITORY / path).exists()]
    assert missing == []


def leads(page: Path, file: str, place: str) -> bool:
    """Return whether a link of `page` to the heading `place` of `file` finds something."""
    target = page.parent / file if file else page
    return target.exists() and (not place or place in places_of(target))


def places_of(page: Path) -> set[str]:
    """Return the links to the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


def test_a_link_that_leads_nowhere_is_found() -> None:
    assert leads(DATA_PAGE, "", "#from-text-to-tokens")
    assert not leads(DATA_PAGE, "", "#from-tokens-to-text")
    assert not leads(DATA_PAGE, "data.markdown", "")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A fence without a language would be a command that nothing runs."""
    unknown = [
        b.line for b in blocks_of(page) if b.language not in ("bash", "console", "text", "mermaid")
    ]
    assert unknown == []


def test_the_readme_leads_to_every_page() -> None:
    """Directly, or by the list of the recipes."""
    lists = (PAGES[0], RECIPES / "index.md")
    links = {
        (page.parent / file).resolve()
        for page in lists
        for file, _ in _LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert {*PAGES[1:]} <= links


@cache
def strings_of_the_source() -> set[tuple[str, ...]]:
    """Return the strings of the source: the parts between the values that they are filled with."""
    return {
        pieces
        for folder in ("megatron", "tools", "tasks", "benchmarks")
        for file in (REPOSITORY / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if sum(map(len, pieces := pieces_of(node))) >= 12
    }


def pieces_of(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%[-\d.]*[sdrgf]", "\0", node.value)
    else:
        return ()
    return tuple(text.strip().split("\0"))


def is_printed(line: str) -> bool:
    """Return whether strings of the source, and not values alone, make up a line."""
    line, covered, letters = line.removeprefix("error: "), set[int](), 0
    for pieces in strings_of_the_source():
        # First what is fast: a search alone would take half a minute.
        is_likely = all(piece in line for piece in pieces)
        if is_likely and (match := re.search("(.+)".join(map(re.escape, pieces)), line)):
            covered |= {*range(*match.span())}
            letters += sum(map(len, pieces))
    return len(covered) > 0.6 * len(line) and letters > 0.4 * len(line)


def quoted_messages() -> list[str]:
    return [line for block in blocks_of(TROUBLE_PAGE, "text") for line in block.text.splitlines()]


def test_messages_of_the_page_of_troubles_are_printed_by_the_source() -> None:
    lines = quoted_messages()
    assert len(lines) > 20
    assert [line for line in lines if not is_printed(line)] == []


def test_a_message_that_nothing_prints_is_found() -> None:
    (line,) = (line for line in quoted_messages() if "is skipped: " in line)
    assert is_printed(line)
    assert not is_printed("run/global_step500 was left alone: its file is broken")
