"""Command lines in use for years: each is accepted as it is, or answered with what to write."""

import json
import lzma
import os
import re
import shlex
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest
import yaml
from ds_json import PIPELINE_AND_ZERO_JSON
from labelled_files import write_mnli, write_race
from packaging.requirements import Requirement
from scripts import tool_at

from megatron.common.errors import ExitCode, MegatronError, before_the_first_step
from megatron.config.config import parse_config
from megatron.config.parsing.parser import peek
from megatron.config.plan.plan import plan
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter
from megatron.extensions.tasks.epochs import with_steps_of_epochs
from megatron.extensions.tasks.flags import is_finetuned, objective_of

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = yaml.safe_load(Path(__file__).with_name("known_commands.yaml").read_text("utf-8"))
VOCAB_SIZE = 50257

HF_TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
    },
}
DOCUMENT = {"src": "a", "text": "A text.", "type": "Eng", "id": "0", "title": "T", "content": "c"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: the files that commands name, but for checkpoints."""
    symbols = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols += [chr(256 + i) for i in range(256 - len(symbols))]
    ids = {symbol: i for i, symbol in enumerate([*symbols, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "bert-vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "ds.json").write_text(json.dumps(PIPELINE_AND_ZERO_JSON))
    (tmp_path / "ds_zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    write_mnli(tmp_path / "MNLI" / "train.tsv", 8)
    write_race(tmp_path / "RACE" / "train", 32)
    for task, columns in (
        ("QQP", ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")),
        ("QNLI", ("index", "question", "sentence", "label")),
    ):
        label = "0" if task == "QQP" else "entailment"
        example = ["1"] * (len(columns) - 3) + ["a", "b", label]
        lines = ["\t".join(each) for each in (columns, *[example] * 8)]
        (tmp_path / task).mkdir()
        (tmp_path / task / "train.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "t5").mkdir()
    for name, content in HF_TOKENIZER.items():
        (tmp_path / "t5" / name).write_text(json.dumps(content))
    for name in ("codeparrot_data.json", "my-corpus.json"):
        (tmp_path / name).write_text(json.dumps(DOCUMENT) + "\n")
    (tmp_path / "my_corpus.txt").write_text("A line of plain text.\n")
    (tmp_path / "array.json").write_text(json.dumps([DOCUMENT], indent=2))
    (tmp_path / "oscar-1GB.jsonl.xz").write_bytes(lzma.compress(json.dumps(DOCUMENT).encode()))
    for part in ("p1", "p2", "p3"):
        with IndexedDatasetWriter(tmp_path / f"{part}_text_document", "u2") as out:
            out.append([1, 2, 3])
    (tmp_path / "hyphens.json").write_text('{"hidden-size": 64, "max-seq-length": 64}')
    (tmp_path / "underscores.yaml").write_text("hidden_size: 64\nnum_attention_heads: 2\n")
    (tmp_path / "megatron.nemo").write_bytes(b"\x1f\x8b")
    (tmp_path / "mp_autoresume-last.ckpt").write_bytes(b"PK")
    (tmp_path / "prompts.txt").write_text("once\n")
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    scored = [{"text": "A text.", "score": {"toxicity": share}} for share in (0.1, 0.9)]
    (tmp_path / "annotated.out").write_text("".join(json.dumps(each) + "\n" for each in scored))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script_and_words(command, folder):
    """Return the script of `command` and what follows it, without launcher and environment."""
    words = shlex.split(command)
    if "bash" in words:
        words = launched(command, folder)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[place].removeprefix(f"{REPOSITORY}/"), words[place + 1 :]


def launched(command, folder):
    """Return the words that the script for bash in `command` hands to its launcher."""
    done = subprocess.run(
        ["bash", "-c", re.sub(r"bash (?=(examples|tools)/)", f"bash {REPOSITORY}/", command)],
        env={"PATH": os.environ["PATH"], "LAUNCHER": r"printf %q\n"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(done.stdout)


def run(script, words, processes):
    """Do what the command asks for, but for steps of training and the conversion of texts."""
    if script.endswith("finetune_gpt.py"):
        script, words = "pretrain_gpt.py", tool_at(script).training_flags(words)
    if "/" not in script:
        config, _ = parse_config(words)
        objective = {"pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}.get(script, "gpt")
        plan(
            config,
            world_size=processes,
            vocab_size=VOCAB_SIZE,
            device="cuda",
            objective=objective,
        )
        return
    tool = tool_at(script)
    if is_finetuned(task := peek(words).get("task")):
        config, _ = parse_config(tool.with_kept_batch(words))
        config = with_steps_of_epochs(config, world_size=processes)
        plan(
            config,
            world_size=processes,
            vocab_size=VOCAB_SIZE,
            device="cuda",
            objective=objective_of(task),
        )
        return
    if hasattr(tool, "preprocess"):
        tool.preprocess = lambda conversion: []
    tool.main(words)


def named(entry):
    return " ".join([entry["run"], entry.get("add", "")])[-60:]


@pytest.mark.parametrize(
    "entry", [each for each in COMMANDS if not {"later", "program"} & each.keys()], ids=named
)
def test_a_known_command_is_accepted_or_answered(entry, folder):
    script, words = script_and_words(f"{entry['run']} {entry.get('add', '')}", folder)
    processes = entry.get("processes", 1)
    if "answer" not in entry:
        run(script, words, processes)
        return
    with pytest.raises(MegatronError) as caught, before_the_first_step():
        run(script, words, processes)
    assert entry["answer"] in str(caught.value)
    assert caught.value.exit_code == entry.get("exit_code", ExitCode.MISUSED)


@pytest.mark.parametrize("entry", [each for each in COMMANDS if "later" in each], ids=named)
def test_the_script_of_a_later_command_is_not_there_yet(entry):
    """Once it is there, its line loses the word "later": then it must run."""
    script = next(word for word in entry["run"].split() if word.endswith((".py", ".sh")))
    assert not (REPOSITORY / script).exists()


@pytest.mark.parametrize("entry", [each for each in COMMANDS if "program" in each], ids=named)
def test_a_program_of_another_package_finds_what_it_needs(entry):
    program, *words = entry["run"].split()
    match words:
        case ["install", "-r", name]:
            lines = (REPOSITORY / name).read_text("utf-8").splitlines()
            assert [Requirement(line) for line in lines if line and line[0] not in "#-"]
        case ["install", "-e", "."]:
            settings = (REPOSITORY / "pyproject.toml").read_text("utf-8")
            assert "[build-system]" in settings
            assert "[project]" in settings
        case _:
            assert program in {file.name for file in files(entry["program"])}
