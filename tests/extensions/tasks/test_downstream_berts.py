"""BERTs with heads of downstream tasks in transformers: weights, logits and predictions, both ways."""

import csv
import importlib.util
import json

import pytest
import torch
import transformers
from architectures import tool
from checkpoints import in_transformers, random_weights, whole_weights, write_checkpoint
from problems import problem
from tiny import tiny_config
from torch.utils.data import default_collate
from transformers import AutoTokenizer, pipeline

from megatron.checkpointing.conversion.adapters import without_adapters
from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.parameter_names import is_of_vocabulary
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError
from megatron.config.plan.plan import plan
from megatron.extensions.tasks.data.task import Predicted
from megatron.extensions.tasks.data.tasks import task_of
from megatron.extensions.tasks.data.text_flags import TextTaskPlan
from megatron.extensions.tasks.flags import objective_of
from megatron.extensions.tasks.objective import labelled_batch
from megatron.tensor_parallel.linear import is_adapter
from megatron.tokenizer.build import build_tokenizer

WORDS = [
    "time",
    "light",
    "water",
    "stone",
    "river",
    "house",
    "night",
    "green",
    "small",
    "large",
    "the",
    "of",
    "in",
    "runs",
    "falls",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "##s"]
VOCAB = [*SPECIAL, *WORDS]
ROWS = len(VOCAB) + 2  # [BOS] and [EOS] too
LABELS = ["O", "B-PER", "I-PER"]
SIZES = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 24
    --max-position-embeddings 48 --tokenizer-type BertWordPieceLowerCase --train-data none
"""
FLAGS = {
    "token-classification": f"--head-layers 1 --labels {' '.join(LABELS)}",
    "question-answering": "--max-query-length 8",
}
CLASSES = {
    "STS-B": "MegatronBertForSequenceClassification",
    "MNLI": "MegatronBertForSequenceClassification",
    "RACE": "MegatronBertForMultipleChoice",
    "token-classification": "MegatronBertForTokenClassification",
    "question-answering": "MegatronBertForQuestionAnswering",
}
NAMES = {
    "STS-B": ["LABEL_0"],
    "MNLI": ["contradiction", "entailment", "neutral"],
    "RACE": [],
    "token-classification": LABELS,
    "question-answering": [],
}
PROBLEMS = {"STS-B": "regression", "MNLI": "single_label_classification"}
SCRIPTS = {
    "STS-B": "tasks/main.py",
    "MNLI": "tasks/text_classification.py",
    "RACE": "tasks/main.py",
    "token-classification": "tasks/token_classification.py",
    "question-answering": "tasks/question_answering.py",
}
FIRST, SECOND = "The river runs in large houses.", "Small green stones. The water falls"


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab").write_text("\n".join(VOCAB) + "\n")
    return build_tokenizer(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab")
    )


def write_bert(tmp_path, task, flags="", *more):
    """Write a checkpoint of a random BERT with the head of a task; return its folder."""
    words = [*SIZES.split(), "--task", task, *flags.split(), *more]
    words += ["--vocab-file", str(tmp_path / "vocab")]
    network = {"vocab_size": ROWS, "objective": objective_of(task)}
    without = ("--data-path",)
    config = tiny_config(*words, without=without)
    weights = random_weights(plan(config, world_size=4, device="cpu", **network).model)
    for name in weights:
        # So that words matter more than what all of them have in common.
        weights[name] *= 5 if "word_embeddings" in name else 0.2 if name.endswith("bias") else 1
    return write_checkpoint(tmp_path / "saved", weights, *words, **network, without=without)


def network_in(folder):
    manifest = read_manifest(folder)
    checkpoint = read_checkpoint(folder, manifest, optimizer=False)
    return load_network(manifest.spec, checkpoint)


@torch.no_grad()
def our_predictions(folder, file, tokenizer):
    """Return the texts of the files that a run writes its predictions for `file` to."""
    own = read_manifest(folder).objective.own
    options = {**own["text"], "labels": tuple(own["text"]["labels"])}
    task = task_of(own["task"], TextTaskPlan(**options))
    data = task.data([file], tokenizer=tokenizer, seq_length=24, trains=False)
    names = ("text", "types", "padding_mask")
    items = default_collate([{name: item[name] for name in names} for item in data])
    rest = dict.fromkeys(("label", "uid", "weight", "index"), torch.zeros(len(data)))
    outputs = network_in(folder)(labelled_batch(**items, **rest))
    if task.name == "token-classification":
        outputs = outputs.argmax(-1)
    elif outputs.dim() == 2:  # a row for each choice
        outputs = outputs.view(len(data), -1)
    (file.parent / "predictions").mkdir()
    written = task.write(file.parent / "predictions", [Predicted(data, outputs.numpy())])
    files = [path for each in written for path in (each.iterdir() if each.is_dir() else [each])]
    return {path.name: path.read_text() for path in files if path.suffix != ".pt"}


def table_of(predictions):
    (text,) = predictions.values()
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


def loaded(task, folder):
    return getattr(transformers, CLASSES[task]).from_pretrained(folder)


def require_same_logits(task, saved, model):
    """Compare the logits of real tokens, and of samples with and without padding."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(ROWS, (4, 12), generator=draw)
    types = (torch.arange(12) > 4).long().expand(4, 12)
    lengths = torch.tensor([12, 9, 12, 12])
    real = torch.arange(12) < lengths[:, None]
    inputs = {"input_ids": tokens, "attention_mask": real.long(), "token_type_ids": types}
    span = torch.stack([torch.zeros_like(lengths), lengths], -1)
    batch = {"tokens": tokens, "token_types": types, "attention_span": span[:, None]}
    batch["positions"] = torch.arange(12).expand(4, 12)
    if task == "RACE":
        inputs = {name: rows[None] for name, rows in inputs.items()}
        batch = {name: rows[None] for name, rows in batch.items()} | {"attention_span": span[None]}
    with torch.no_grad():
        ours, theirs = network_in(saved)(batch), model.eval()(**inputs)
    if task == "question-answering":
        theirs = torch.stack([theirs.start_logits, theirs.end_logits], -1)
    else:
        theirs = theirs.logits
    if task in ("question-answering", "token-classification"):
        ours, theirs = ours[real], theirs[real]
    torch.testing.assert_close(theirs.reshape(ours.shape), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", CLASSES)
def test_a_head_is_the_same_in_transformers_and_back(task, group, tmp_path, tokenizer, capsys):
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    saved = write_bert(tmp_path, task, f"{FLAGS.get(task, '')} {layout}")
    tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == [CLASSES[task]]
    assert list(config.get("id2label", {}).values()) == NAMES[task]
    assert config.get("problem_type") == PROBLEMS.get(task)
    card = (tmp_path / "hf/README.md").read_text()
    assert "logits differ by" in card and "One error remains" not in card

    require_same_logits(task, saved, loaded(task, tmp_path / "hf"))

    capsys.readouterr()
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "back")
    assert f"flags of {SCRIPTS[task]}:" in capsys.readouterr().out
    back = tmp_path / "back" / "global_step0"
    found = whole_weights(back, read_manifest(back))
    weights = whole_weights(saved, read_manifest(saved))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        rows = ROWS if is_of_vocabulary(name) else len(weight)
        assert torch.equal(found[name], weight[:rows]), name
    tool("to_hf", "--load", tmp_path / "back", "--save", tmp_path / "twice", "--no-verify")
    twice = json.loads((tmp_path / "twice/config.json").read_text())
    # The tokenizer of transformers has other tokens for the ends of texts.
    ends = {"bos_token_id", "eos_token_id"}
    assert {name for name, value in config.items() if twice[name] != value} <= ends
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "twice")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("task", CLASSES)
def test_adapters_are_merged_into_the_export_or_written_for_peft(task, group, tmp_path, tokenizer):
    lora = "--lora-rank 2 --lora-alpha 3 --lora-target-modules all-linear"
    saved = write_bert(tmp_path, task, f"{FLAGS.get(task, '')} {lora}")
    tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    require_same_logits(task, saved, loaded(task, tmp_path / "hf"))
    if importlib.util.find_spec("peft") is None:
        return
    from peft import PeftModel

    manifest, base = read_manifest(saved), loaded(task, tmp_path / "hf")
    weights = whole_weights(saved, manifest)
    for name, weight in [*weights.items()]:
        if "classification_head" in name or "pooler" in name:
            weight.zero_()  # the base has another head
        elif is_of_vocabulary(name):
            weights[name] = weight[:ROWS]
    spec = without_adapters(manifest.spec)
    named = in_transformers(spec, {n: w for n, w in weights.items() if not is_adapter(n)})
    base.load_state_dict(named, strict=False)
    tool("lora_to_peft", "--load", saved.parent, "--save", tmp_path / "peft")
    require_same_logits(task, saved, PeftModel.from_pretrained(base, tmp_path / "peft"))


def test_texts_are_classified_by_transformers_alone(group, tmp_path, tokenizer):
    saved = write_bert(tmp_path, "text-classification", "--labels", "very bad", "good")
    tool("to_hf", "--load", saved, "--save", tmp_path / "hf", "--no-verify")
    (tmp_path / "texts.tsv").write_text(f"{FIRST}\tgood\n{SECOND}\tgood\n")
    ours = table_of(our_predictions(saved, tmp_path / "texts.tsv", tokenizer))
    theirs = pipeline("text-classification", model=str(tmp_path / "hf"))([FIRST, SECOND])
    for own, other in zip(ours, theirs, strict=True):
        assert own["prediction"] == other["label"]
        assert float(own[f"probability of {other['label']}"]) == pytest.approx(
            other["score"], rel=1e-5
        )


def test_pairs_are_scored_by_transformers_alone(group, tmp_path, tokenizer):
    saved = write_bert(tmp_path, "STS-B")
    tool("to_hf", "--load", saved, "--save", tmp_path / "hf", "--no-verify")
    header = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
    row = ["0", "g", "f", "y", "0", "s", "s", FIRST, SECOND, "2.5"]
    lines = ["\t".join(header.split()), "\t".join(row)]
    (tmp_path / "dev.tsv").write_text("\n".join(lines) + "\n")
    (ours,) = table_of(our_predictions(saved, tmp_path / "dev.tsv", tokenizer))
    score = pipeline("text-classification", model=str(tmp_path / "hf"))
    theirs = score({"text": FIRST, "text_pair": SECOND})
    assert float(ours["prediction"]) == pytest.approx(theirs["score"], rel=1e-5)


def test_words_are_labelled_by_transformers_alone(group, tmp_path, tokenizer):
    saved = write_bert(tmp_path, "token-classification", FLAGS["token-classification"])
    tool("to_hf", "--load", saved, "--save", tmp_path / "hf", "--no-verify")
    sentences = ["Rivers of green stone", "Time falls in the large house", "Night", "Water runs"]
    (tmp_path / "text_new.txt").write_text("\n".join(sentences) + "\n")
    (ours,) = our_predictions(saved, tmp_path / "text_new.txt", tokenizer).values()
    tag = pipeline("token-classification", model=str(tmp_path / "hf"), ignore_labels=[])
    theirs = [
        [piece["entity"] for piece in pieces if not piece["word"].startswith("##")]
        for pieces in tag(sentences)
    ]
    assert [line.split() for line in ours.splitlines()] == theirs
    assert len({label for line in theirs for label in line}) > 1


def test_questions_have_the_same_answers_in_transformers(group, tmp_path, tokenizer):
    saved = write_bert(tmp_path, "question-answering", FLAGS["question-answering"])
    tool("to_hf", "--load", saved, "--save", tmp_path / "hf", "--no-verify")
    questions = {"a": "time of houses?", "b": "large?"}
    content = {
        "data": [
            {
                "title": "",
                "paragraphs": [
                    {
                        "context": FIRST,
                        "qas": [
                            {"id": uid, "question": text, "answers": []}
                            for uid, text in questions.items()
                        ],
                    }
                ],
            }
        ]
    }
    (tmp_path / "test.json").write_text(json.dumps(content))
    ours = our_predictions(saved, tmp_path / "test.json", tokenizer)
    answers = json.loads(ours["test_prediction.json"])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "hf").eval()
    for uid, question in questions.items():
        words = theirs(question, FIRST, return_tensors="pt", return_offsets_mapping=True)
        offsets = words.pop("offset_mapping")[0]
        with torch.no_grad():
            output = model(**words)
        in_context = torch.tensor([part == 1 for part in words.sequence_ids()])
        scores = output.start_logits[0][:, None] + output.end_logits[0]
        is_answer = (in_context[:, None] & in_context).triu()
        first, last = divmod(int(scores.masked_fill(~is_answer, -torch.inf).argmax()), len(scores))
        assert answers[uid] == [question, FIRST[offsets[first][0] : offsets[last][1]]]


def test_a_head_of_two_layers_is_refused(group, tmp_path, tokenizer):
    saved = write_bert(tmp_path, "token-classification", "--head-layers 2 --labels a b")
    with problem("head_layers … 2 … 1 … --head-layers", CheckpointError):
        tool("to_hf", "--load", saved, "--save", tmp_path / "hf")


def test_a_classifier_of_several_labels_at_once_is_refused(group, tmp_path):
    config = transformers.MegatronBertConfig(
        hidden_act="gelu",
        architectures=["MegatronBertForSequenceClassification"],
        problem_type="multi_label_classification",
    )
    config.save_pretrained(tmp_path / "hf")
    with problem("problem_type … multi_label_classification", CheckpointError):
        tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
