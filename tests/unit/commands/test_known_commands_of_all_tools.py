"""Command lines in use for years: each is accepted as it is, or answered with what to write."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron.config.config import parse_config
from megatron.errors import ExitCode, MegatronError, before_the_first_step
from megatron.plan.plan import plan

REPOSITORY = Path(__file__).resolve().parents[3]
COMMANDS = yaml.safe_load(Path(__file__).with_name("known_commands.yaml").read_text("utf-8"))
VOCAB_SIZE = 50257

DS_JSON = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 12,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
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
    """The working directory: what the commands of data read, and a prompt."""
    symbols = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols += [chr(256 + i) for i in range(256 - len(symbols))]
    ids = {symbol: i for i, symbol in enumerate([*symbols, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "bert-vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "ds.json").write_text(json.dumps(DS_JSON))
    (tmp_path / "ds_zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "t5").mkdir()
    for name, content in HF_TOKENIZER.items():
        (tmp_path / "t5" / name).write_text(json.dumps(content))
    for name in ("codeparrot_data.json", "my-corpus.json"):
        (tmp_path / name).write_text(json.dumps(DOCUMENT) + "\n")
    (tmp_path / "prompts.txt").write_text("once\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script_and_words(command):
    """Return the script of `command` and what follows it, without launcher and environment."""
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[place], words[place + 1 :]


def tool_at(script):
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", script), REPOSITORY / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, words, processes):
    """Do what the command asks for, but for steps of training and the conversion of texts."""
    if "/" not in script:
        config, _ = parse_config(words)
        plan(config, world_size=processes, vocab_size=VOCAB_SIZE, device="cuda")
        return
    tool = tool_at(script)
    if hasattr(tool, "preprocess"):
        tool.preprocess = lambda conversion: []
    tool.main(words)


@pytest.mark.parametrize(
    "entry", COMMANDS, ids=lambda entry: " ".join([entry["run"], entry.get("add", "")])[-60:]
)
def test_a_known_command_is_accepted_or_answered(entry, folder):
    script, words = script_and_words(f"{entry['run']} {entry.get('add', '')}")
    if "answer" not in entry:
        run(script, words, entry.get("processes", 1))
        return
    with pytest.raises(MegatronError) as caught, before_the_first_step():
        run(script, words, entry.get("processes", 1))
    assert entry["answer"] in str(caught.value)
    assert caught.value.exit_code == ExitCode.MISUSED
