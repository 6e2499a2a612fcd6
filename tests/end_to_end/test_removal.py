"""Each extension can be taken away: what is left neither imports nor names it, and works."""

import ast
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from jobs import REPOSITORY, Corpus, clean_environment, journal, start_ranks
from source import PACKAGE, SCRIPTS, imported_libraries, imported_modules

from megatron.common.extensions import PACKAGE as EXTENSIONS
from megatron.common.extensions import extension_names

FOLDER = PACKAGE / "extensions"
NAMED = re.compile(r"\bextensions[./](\w+)")
TESTS = REPOSITORY / "tests"
HELPERS = {
    file.stem: file.parent.name
    for file in (TESTS / "extensions").glob("*/*.py")
    if file.stem != "conftest" and not file.stem.startswith("test_")
}
"""Modules that tests of an extension share, and the extension."""

TRAINING = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--lr", "1e-3", "--eval-iters", "0"),
    *("--device", "cpu", "--save", "run", "--load", "run"),
)
EXPORTS = "tools/convert_checkpoint/to_hf.py"


@cache
def needs(extension: str) -> set[str]:
    """Return the extensions that one needs directly, by its docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / extension / "__init__.py").read_text())) or ""
    found = re.search(r"^Needs: (.*)\.$", text, re.MULTILINE)
    return set(found[1].split(", ")) if found else set()


def removed_with(extension: str) -> set[str]:
    """Return an extension and all that need it."""
    found = {extension}
    while more := {each for each in extension_names() if needs(each) & found} - found:
        found |= more
    return found


@cache
def extensions_in(file: Path) -> set[str]:
    """Return the extensions that a file of Python imports, or names in a text for an import.

    Of a test, those too whose tests have a helper that it imports.
    """
    modules = imported_modules(file)
    imported = {name.split(".")[2] for name in modules if name.startswith(f"{EXTENSIONS}.")}
    named = {
        match
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for match in NAMED.findall(node.value)
    }
    helped = {HELPERS[top] for top in imported_libraries(file) if top in HELPERS}
    return imported | named & {*extension_names()} | helped


@pytest.mark.parametrize("extension", extension_names())
def test_an_extension_says_which_others_it_needs(extension: str) -> None:
    files = (FOLDER / extension).rglob("*.py")
    used = set().union(*map(extensions_in, files)) - {extension}
    assert used == needs(extension)


def test_extensions_do_not_need_each_other() -> None:
    for each in extension_names():
        assert not needs(each) & (removed_with(each) - {each})


@pytest.mark.parametrize("extension", extension_names())
def test_what_is_left_does_not_name_an_extension(extension: str) -> None:
    removed = removed_with(extension)
    left = [
        file
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).parts[:2] not in {("extensions", each) for each in removed}
    ]
    assert [str(file) for file in left if extensions_in(file) & removed] == []


@pytest.mark.parametrize("extension", extension_names())
def test_its_tests_need_what_it_needs(extension: str) -> None:
    needed = {each for each in extension_names() if extension in removed_with(each)}
    files = (TESTS / "extensions" / extension).glob("*.py")
    assert {
        file.name: extensions_in(file) - needed for file in files if extensions_in(file) - needed
    } == {}


def test_other_tests_need_no_extension() -> None:
    """But for those of the imports of extensions, and of several extensions at once."""
    about = [TESTS / "architecture", TESTS / "extensions", TESTS / "floors.py", Path(__file__)]
    files = [file for file in TESTS.rglob("*.py") if not {*about} & {file, *file.parents}]
    assert {file.name: extensions_in(file) for file in files if extensions_in(file)} == {}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree without its tests, all extensions, and the scripts that use one.

    What is compiled is copied too, which is valid as long as times of files are kept.
    """
    copy = tmp_path_factory.mktemp("core").resolve()
    listed = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run(
        [*listed, "--exclude-standard"], check=True, capture_output=True, text=True
    )
    scripts = {file for file in SCRIPTS if extensions_in(file)}
    removed = {TESTS, *(FOLDER / each for each in extension_names())}
    for name in filter(None, done.stdout.split("\0")):
        file = REPOSITORY / name
        if file.is_file() and file not in scripts and removed.isdisjoint(file.parents):
            for each in filter(Path.is_file, (file, Path(cache_from_source(str(file))))):
                place = copy / each.relative_to(REPOSITORY)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(each, place)
    return copy


def run(copy: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env={**clean_environment(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


IN_FORKS = """
import faulthandler, gc, os, sys, traceback
import deepspeed, transformers.modeling_utils

def in_fork(name, function, *words):
    # A fork has all imports; it leaves hard, as to take them down takes seconds.
    gc.freeze()
    fork = os.fork()
    if fork:
        if os.waitpid(fork, 0)[1]:
            sys.exit(f"{name} failed")
        return
    # A lock that a thread held stays locked in a fork: what waits for it says where.
    faulthandler.dump_traceback_later(300, exit=True)
    code = 1
    try:
        function(*words)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""

IMPORT_ALL = """
import importlib
from pathlib import Path

def import_all(folder, package):
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        module = ".".join([package, *parts]).removesuffix(".__init__")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name.startswith("megatron"):
                raise

import_all(Path("megatron"), "megatron")
assert importlib.import_module("megatron.api").__file__ == f"{os.getcwd()}/megatron/api.py"
from megatron.common import extensions

def import_extensions(folder):
    sys.modules[extensions.PACKAGE].__path__ = [folder]
    extensions._FOLDER = Path(folder)
    extensions.extension_names.cache_clear()
    for each in extensions.extension_names():
        import_all(Path(folder, each).resolve(), f"{extensions.PACKAGE}.{each}")

for folder in sys.argv[1:]:
    in_fork(f"the import of {folder}", import_extensions, folder)
"""


def test_every_module_that_is_left_can_be_imported(core: Path, tmp_path: Path) -> None:
    """The core without any extension, then all extensions but each and those that need it."""
    for removed in extension_names():
        (tmp_path / removed).mkdir()
        for left in {*extension_names()} - removed_with(removed):
            (tmp_path / removed / left).symlink_to(FOLDER / left)
    run(core, "-c", IN_FORKS + IMPORT_ALL, *(str(tmp_path / each) for each in extension_names()))


RUN_ALL = """
import json, runpy

def run(words):
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")

for words in json.loads(sys.argv[1]):
    in_fork(words, run, words)
"""


def test_a_gpt_needs_no_extension(core: Path, corpus: Corpus) -> None:
    """Preprocess, train, resume, generate and export, in a tree without any."""
    assert [file.name for file in (core / "megatron/extensions").glob("*.py")] == ["__init__.py"]
    own = ("--input", corpus.text_file, "--output-prefix", "own", "--append-eod")
    vocabulary = ("--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file)
    trains = ("pretrain_gpt.py", *TRAINING, "--data-path", "own_text_document", *vocabulary)
    trains += ("--train-iters", "4", "--log-interval", "1")
    samples = ("--num-samples", "1", "--genfile", "texts.jsonl")
    commands = [
        ("tools/preprocess_data.py", *own, "--tokenizer-type", "GPT2BPETokenizer", *vocabulary),
        (*trains, "--exit-interval", "2"),
        trains,
        ("tools/generate_samples_gpt.py", "--load", "run", *samples, *vocabulary),
        (EXPORTS, "--load", "run", "--save", "exported", *vocabulary),
    ]
    run(core, "-c", IN_FORKS + RUN_ALL, json.dumps([[*map(str, words)] for words in commands]))
    assert [each["iteration"] for each in journal(core / "run", "train")] == [1, 2, 3, 4]
    assert (core / "exported" / "config.json").is_file()


TRAIN_AND_PRINT = """
import sys
from pretrain_gpt import main
main(sys.argv[1:])
print("loaded:", *(name for name in sys.modules if name.startswith("megatron.extensions.")))
"""


def test_a_gpt_is_trained_and_resumed_without_importing_an_extension(
    tmp_path: Path, corpus: Corpus
) -> None:
    """In forks of a process that has imported what runs of a GPT import, and perhaps more."""
    script = tmp_path / "train_and_print.py"
    script.write_text(TRAIN_AND_PRINT)
    folder = ("--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"))
    words = (*TRAINING[:-4], *folder, *corpus.flags, "--train-iters", "2", "--log-interval", "1")
    for stop in (("--exit-interval", "1"), ("--use-checkpoint-args",)):
        (printed,) = start_ranks(1, *words, *stop, script=str(script)).succeeded().outputs
        assert printed.splitlines()[-1].strip() == "loaded:"
