"""GPTs with a classification head in transformers: weights, logits and predictions, both ways."""

import importlib.util
import json

import pytest
import torch
from architectures import OURS, SIZES, TOOLS, tool
from checkpoints import random_weights, whole_weights, write_checkpoint
from problems import problem
from tiny import tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import default_collate
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.config.plan.plan import plan
from megatron.extensions.tasks.data.tasks import task_of
from megatron.extensions.tasks.data.text_flags import TextTaskPlan
from megatron.extensions.tasks.flags import objective_of
from megatron.extensions.tasks.objective import scored_batch
from megatron.inference.loading.loaded_model import require_service, tokenizer_and_spec
from megatron.inference.loading.model_source import read_model_source
from megatron.tokenizer.build import build_tokenizer

WORDS = ["<end>", "time", "light", "water", "stone", "river", "house", "night", "green", "small"]
TEXTS = ["time light water", "stone", "river house night green small time", "green river"]
LABELS = ("--labels", "bad", "good", "none")
CLASSES = {
    "gpt2": "GPT2ForSequenceClassification",
    "llama 2": "LlamaForSequenceClassification",
    "bloom": "BloomForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "pythia": "GPTNeoXForSequenceClassification",
}


@pytest.fixture
def words(tmp_path):
    """Return flags of a tokenizer of transformers without padding, as GPT-2's."""
    ids = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "words")
    return ("--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", tmp_path / "words")


def write_gpt(tmp_path, flags, words, task, *more):
    """Write a checkpoint of a random GPT with the head of a task; return its folder."""
    sizes = SIZES.replace("--tokenizer-type NullTokenizer --vocab-size 10", "")
    flags = [*sizes.split(), *flags.split(), *map(str, words), "--task", task, *more]
    flags += ["--train-data", "none"]
    network = {"vocab_size": len(WORDS), "objective": objective_of(task, causal=True)}
    config = tiny_config(*flags, without=("--data-path",))
    weights = random_weights(plan(config, world_size=4, device="cpu", **network).model)
    return write_checkpoint(
        tmp_path / "saved", weights, *flags, **network, without=("--data-path",)
    )


@torch.no_grad()
def probabilities_of(folder, file, words):
    """Return our probabilities of the classes of each text of a file."""
    manifest = read_manifest(folder)
    own = manifest.objective.own
    options = {**own["text"], "labels": tuple(own["text"]["labels"])}
    task = task_of(own["task"], TextTaskPlan(**options), causal=True)
    tokenizer = build_tokenizer(tokenizer_type=words[1], tokenizer_name_or_path=str(words[3]))
    data = task.data([file], tokenizer=tokenizer, seq_length=10, trains=False)
    items = default_collate([dict(item) for item in data])
    rest = dict.fromkeys(("weight", "index"), torch.zeros(len(data)))
    batch = scored_batch(**items, **rest)
    checkpoint = read_checkpoint(folder, manifest, optimizer=False)
    logits = load_network(manifest.spec, checkpoint)(batch)
    return logits[torch.arange(len(data)), batch["last"]].softmax(-1)


@pytest.mark.parametrize("case", CLASSES)
def test_a_classifier_is_the_same_in_transformers_and_back(case, group, tmp_path, words):
    saved = write_gpt(tmp_path, OURS[case][1], words, "text-classification", *LABELS)
    tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == [CLASSES[case]]
    assert [*config["id2label"].values()] == [*LABELS[1:]]

    (tmp_path / "texts.tsv").write_text("".join(f"{text}\tgood\n" for text in TEXTS))
    ours = probabilities_of(saved, tmp_path / "texts.tsv", words)
    # In one batch, of texts of different lengths.
    classify = pipeline("text-classification", model=str(tmp_path / "hf"), batch_size=4, top_k=3)
    theirs = [{each["label"]: each["score"] for each in found} for found in classify(TEXTS)]
    for row, scores in zip(ours.tolist(), theirs, strict=True):
        assert row == pytest.approx([scores[name] for name in LABELS[1:]], abs=1e-5)

    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "back")
    back = tmp_path / "back" / "global_step0"
    found = whole_weights(back, read_manifest(back))
    for name, weight in whole_weights(saved, read_manifest(saved)).items():
        assert torch.equal(found[name], weight[: len(found[name])]), name


def test_a_regression_and_its_pairs(group, tmp_path, words):
    saved = write_gpt(tmp_path, "", words, "STS-B")
    tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.config.problem_type == "regression" and model.score.out_features == 1


def test_multiple_choice_of_a_gpt_is_refused(group, tmp_path, words):
    saved = write_gpt(tmp_path, "", words, "RACE")
    with problem("num_choices … 4 … 1", CheckpointError):
        tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")


def test_adapters_of_a_classifier_are_written_with_its_head(group, tmp_path, words):
    lora = ("--lora-rank", "2", "--lora-alpha", "3", *LABELS)
    saved = write_gpt(tmp_path, OURS["llama 3"][1], words, "text-classification", *lora)
    tool("lora_to_peft", "--load", saved.parent, "--save", tmp_path / "peft")
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_tools_of_language_models_refuse_a_classifier(group, tmp_path, words, capsys):
    saved = write_gpt(tmp_path, "", words, "MNLI", "--save", "none", "--no-save-optim")
    source = read_model_source(["--load", str(saved.parent)], {}, description="")
    _, spec = tokenizer_and_spec(source)
    with problem("--task MNLI", WrongCheckpointError):
        require_service(source, spec, "prompts")
    file = TOOLS.parent / "checkpoint" / "inspect.py"
    found = importlib.util.spec_from_file_location("inspect_checkpoint", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.main([str(saved.parent)])
    assert "evaluate with: tasks/main.py --epochs 0" in capsys.readouterr().out
