"""tasks/main.py, in this process, beside plain loops over transformers' own model."""

import json
import math
import re

import pytest
import torch
from checkpoints import spread_network, write_checkpoint
from problems import problem
from stages import plain_logits
from tiny import tiny_plan
from untrained import LENGTH, WRITTEN, log_probabilities, tool_of

from megatron.common.errors import CheckpointError, DataError

CUT = (
    " = Valkyria = \n"
    ' The 3 @,@ 000 valley folk \'s role was well @-@ known , as in " the war " ( or so ) . \n'
    " The game began in 2010 , and the valley 's folk began to know the war in the game . \n"
)


@pytest.fixture(scope="module")
def tool():
    main = tool_of("main.py").main
    return lambda *words: main(words)


def plain_perplexity(model, tokens, *, stride, words):
    """Return what the tool should print, found a token at a time."""
    total = 0.0
    for index in range(1, len(tokens)):
        first = max(0, math.ceil((index - LENGTH) / stride)) * stride
        total -= log_probabilities(model, tokens[first:index])[tokens[index]].item()
    loss, ratio = total / (len(tokens) - 1), (len(tokens) - 1) / (words - 1)
    return [loss, math.exp(loss), math.exp(loss * ratio), ratio]


def told_by(capsys):
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "results" in line)
    return [float(number) for number in re.findall(r": ([\d.E+-]+)", line)]


@pytest.mark.parametrize(("stride", "batch"), [(1, 8), (5, 3), (LENGTH, 1), (None, 4)])
def test_perplexity_is_that_of_a_plain_loop(tool, theirs, tmp_path, capsys, stride, batch):
    folder, model, tokenizer = theirs
    text = tmp_path / "wiki.test.tokens"
    text.write_text(CUT)
    flags = [] if stride is None else ["--overlapping-eval", str(stride)]
    tool(
        *("--task", "WIKITEXT103", "--valid-data", str(text), "--load", str(folder), *flags),
        *("--micro-batch-size", str(batch), "--checkpoint-activations", "--log-interval", "1000"),
        *("--no-load-optim", "--no-load-rng"),
    )
    expected = plain_perplexity(
        model,
        tokenizer.encode(WRITTEN),
        stride=stride or LENGTH,
        words=len(CUT.strip().split(" ")),
    )
    assert told_by(capsys) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def is_foretold(model, context, target):
    tokens = [*context, *target][-LENGTH - 1 :]
    most_likely = model(torch.tensor([tokens[:-1]])).logits[0].argmax(-1).tolist()
    return most_likely[-len(target) :] == tokens[-len(target) :]


def passages(model, tokenizer):
    """Return texts of which the network foretells the end of some."""
    words = WRITTEN.split()
    for index in range(3, len(words)):
        context = " ".join(words[max(0, index - 8) : index])
        tokens = tokenizer.encode(context)
        yield f"{context} {words[index]}"
        for count in (1, 2):
            most_likely = list(tokens)
            for _ in range(count):
                most_likely.append(int(log_probabilities(model, most_likely[-LENGTH:]).argmax()))
            last = tokenizer.decode(most_likely[len(tokens) :])
            if last.startswith(" ") and len(last.split()) == 1 and last == last.rstrip():
                yield context + last


@pytest.mark.parametrize("strict", [False, True])
def test_accuracy_is_that_of_a_plain_loop(tool, theirs, tmp_path, capsys, strict):
    folder, model, tokenizer = theirs
    texts = [*passages(model, tokenizer), "folk"]
    file = tmp_path / "lambada_test.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    correct = 0
    for text in texts:
        if strict:
            *before, word = text.split()
            context, target = tokenizer.encode(" ".join(before)), tokenizer.encode(f" {word}")
        else:
            *context, last = tokenizer.encode(text)
            target = [last]
        correct += is_foretold(model, context or [tokenizer.eos_token_id], target)
    assert 3 < correct < len(texts) - 3
    tool(
        *("--task", "LAMBADA", "--valid-data", str(file), "--load", str(folder)),
        *("--micro-batch-size", "5", *(["--strict-lambada"] if strict else [])),
    )
    assert told_by(capsys) == pytest.approx([correct, len(texts), correct / len(texts)], rel=1e-4)


def test_a_checkpoint_of_any_layout_is_measured(tool, group, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr("megatron.common.progress.EVERY_S", 0.0)
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]
    spec = tiny_plan(*flags, *layout, world_size=4).model
    model = spread_network(spec, group)
    folder = write_checkpoint(tmp_path / "run", model.state_dict(), *flags, *layout)
    numbers = torch.arange(40).pow(2).remainder(9).tolist()
    text = tmp_path / "wiki"
    text.write_text(" ".join(map(str, numbers)))
    total = 0.0
    for index in range(1, len(numbers)):
        first = max(0, math.ceil((index - spec.seq_length) / 2)) * 2
        logits = plain_logits(model, spec, numbers[first:index])[-1]
        total -= logits.log_softmax(-1)[numbers[index]].item()
    for load in (folder, folder.parent):
        tool(
            *("--task", "WIKITEXT103", "--valid-data", str(text), "--load", str(load)),
            *("--overlapping-eval", "2"),
        )
        out = capsys.readouterr().out
        assert "evaluation: 39 of 39 tokens | done: 100.0%" in caplog.text + out
        assert f"avg loss: {total / 39:.4E} | " in out
        assert "token ratio: 1.0 |" in out


@pytest.mark.parametrize("name", ["ICT-ZEROSHOT-NQ", "RET-FINETUNE-NQ"])
def test_a_task_that_retrieves_is_refused_by_name(tool, name):
    with problem(f"--task {name} … WIKITEXT103 or LAMBADA"):
        tool("--task", name, "--qa-data-dev", "b")


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--task", "WIKITEXT103", "--valid-data", "a", "b"], "--valid-data … one file … 2"),
        (
            ["--task", "WIKITEXT103", "--valid-data", "a", "--overlapping-eval", "13"],
            "eval 13 … between 1",
        ),
        (
            ["--task", "WIKITEXT103", "--valid-data", "a", "--overlapping-eval", "0"],
            "eval 0 … between 1",
        ),
        (
            ["--task", "WIKITEXT103", "--valid-data", "a", "--strict-lambada"],
            "--strict-lambada … LAMBADA",
        ),
        (
            ["--task", "LAMBADA", "--valid-data", "a", "--seq-length", "13"],
            "--seq-length 13 … --max-pos",
        ),
        (
            ["--task", "LAMBADA", "--valid-data", "a", "--epochs", "3"],
            "--epochs … LAMBADA … trained",
        ),
        (["--task", "cola", "--valid-data", "a"], "--task … 'cola' … CoLA"),
        (["--task", "COPA", "--valid-data", "a"], "--task … 'COPA'"),
        (["--task", "LAMBADA"], "one file … LAMBADA … 0"),
        (["--valid-data", "a"], "--task … required"),
    ],
)
def test_a_contradiction_is_reported(tool, theirs, flags, reported):
    with problem(reported):
        tool("--load", str(theirs[0]), *flags)


@pytest.mark.parametrize(
    ("task", "name", "content", "reported"),
    [
        ("WIKITEXT103", "other", b"a b", "name … corpus"),
        ("WIKITEXT103", "wiki", b"\xff", "can't decode byte"),
        ("WIKITEXT103", "wiki", b"a", "wiki … at least 2"),
        ("LAMBADA", "lines", b"", "lines … empty"),
        ("LAMBADA", "lines", b'{"text": "a b"}\n\n{"text": 3}', 'lines:3 … "text"'),
        ("LAMBADA", "lines", b'{"text": "a b"}\n{', "lines:2 … JSON"),
        ("LAMBADA", "lines", b'{"text": "a %s"}' % (b"~" * 30), "last word … 31 tokens"),
    ],
)
def test_data_that_cannot_be_used_is_reported(
    tool, theirs, tmp_path, task, name, content, reported
):
    # Not tmp_path itself, whose name says things too.
    (tmp_path / name).write_bytes(content)
    strict = ["--strict-lambada"] if task == "LAMBADA" else []
    with problem(reported, DataError):
        tool(
            *("--task", task, "--valid-data", str(tmp_path / name)),
            *("--load", str(theirs[0]), *strict),
        )


def test_a_missing_model_is_reported(tool, tmp_path):
    with problem("no complete checkpoint", CheckpointError):
        tool("--task", "LAMBADA", "--valid-data", "a", "--load", str(tmp_path))
