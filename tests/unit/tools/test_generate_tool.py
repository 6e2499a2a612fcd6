"""tools/generate_samples_gpt.py, in this process, on an untrained network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import spread_network, write_checkpoint
from problems import problem
from scripts import module_of
from stages import plainly_continued
from tiny import tiny_plan
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.common.errors import CheckpointError, DataError
from megatron.inference.loading import model_source
from megatron.tensor_parallel.linear import is_adapter

FILE = Path(__file__).resolve().parents[3] / "tools" / "generate_samples_gpt.py"
FLAGS = [
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "10"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "3"),
]
NEW = 5
EOD = 10


@pytest.fixture(scope="module")
def tool():
    return module_of(FILE).main


@pytest.fixture(scope="module")
def trained(group, tmp_path_factory):
    """A checkpoint of two tensor-parallel ranks and two stages, its network and its directory."""
    directory = tmp_path_factory.mktemp("trained")
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    spec = tiny_plan(*FLAGS, *layout, world_size=4).model
    model = spread_network(spec, group)
    write_checkpoint(directory, model.state_dict(), *FLAGS, *layout)
    return directory, spec, model


@pytest.fixture
def generate(tool, trained):
    return lambda *flags: tool(["--load", str(trained[0]), "--out-seq-length", str(NEW), *flags])


def expected_text(trained, line):
    _, spec, model = trained
    prompt = [int(word) for word in line.split()] or [EOD]
    new = plainly_continued(model, spec, prompt, NEW, stops=[EOD])
    # Behind a prompt a number is divided from the one before it.
    text = "".join(f" {token}" for token in new if token != EOD)
    return text if line else text.lstrip()


def test_every_line_of_a_file_is_continued(generate, trained, tmp_path):
    lines = ["1 2", "", "3", "4 5 6 7", "8 9 1", "0", "2"]
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join(lines).encode())
    generate("--sample-input-file", str(file), "--greedy")
    blocks = [
        f"Context:\n{line}\n\nMegatron-LM:\n{expected_text(trained, line)}\n\n" for line in lines
    ]
    assert (tmp_path / "prompts.txt.out").read_text() == "".join(blocks)

    out = tmp_path / "out.jsonl"
    generate(
        *("--sample-input-file", str(file), "--sample-output-file", str(out)),
        *("--greedy", "--recompute", "--logprobs", "--inference-dtype", "fp32"),
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["context"] for record in records] == lines
    assert [record["text"] for record in records] == [expected_text(trained, i) for i in lines]
    for record in records:
        assert len(record["logprobs"]) == len(record["tokens"]) == record["length"]
        assert len(record["prompt_logprobs"]) == len(record["prompt_tokens"]) - 1


def test_options_of_the_engine_change_no_text(generate, trained, capsys):
    line = "1 2 3 1 2 3 1 2"
    generate(
        *("--prompt", line, "--greedy", "--prompt-lookup-num-tokens", "3"),
        *("--max-num-batched-tokens", "3", "--no-prefix-caching"),
    )
    written = capsys.readouterr()
    assert f"Megatron-LM:\n{expected_text(trained, line)}\n" in written.out
    assert "| draft tokens: " in written.err
    with problem("--prompt-lookup-num-tokens 3 … recomputed"):
        generate("--prompt", line, "--prompt-lookup-num-tokens", "3", "--recompute")
    with problem("--beam-width … --prompt-lookup-num-tokens"):
        generate("--prompt", line, "--prompt-lookup-num-tokens", "3", "--beam-width", "2")


def test_a_prompt_goes_to_the_terminal(generate, trained, capsys):
    prompt, text = next(
        (prompt, text)
        for prompt in map(str, range(EOD))
        if len((text := expected_text(trained, prompt)).split()) == NEW
    )
    generate("--prompt", prompt, "--greedy")
    assert capsys.readouterr().out == f"Context:\n{prompt}\n\nMegatron-LM:\n{text}\n\n"
    first = text.split()[0]
    generate("--prompt", prompt, "--greedy", "--stop-tokens", first)
    assert capsys.readouterr().out.endswith("Megatron-LM:\n\n\n")
    generate("--prompt", prompt, "--greedy", "--stop-strings", "x", text[2:5])
    assert capsys.readouterr().out.endswith(f"Megatron-LM:\n{text[: text.index(text[2:5])]}\n\n")
    generate("--prompt", prompt, "--greedy", "--inference-max-seq-length", "3")
    assert f"Megatron-LM:\n {' '.join(text.split()[:2])}\n\n" in capsys.readouterr().out
    generate("--prompt", prompt, "--beam-width", "1")
    assert capsys.readouterr().out.endswith(f"Megatron-LM:\n{text}\n\n")
    generate("--prompt", prompt, "--beam-width", "4", "--length-penalty", "0.5", "--bf16")
    assert "Megatron-LM:\n" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--beam-width", "2"]], ids=["sampled", "beams"])
def test_a_text_that_ends_at_the_last_position_is_warned_of(tool, trained, capsys, stdin, more):
    load = ["--load", str(trained[0]), *(more or ["--greedy"])]
    prompt = "1 2 3 4 5 6 7 8 9 1 2 3 4 5"
    tool([*load, "--out-seq-length", "2", "--prompt", prompt])
    assert "positions" not in capsys.readouterr().err
    tool([*load, "--out-seq-length", "9", "--prompt", prompt])
    reported = "1 of 1 texts end before --out-seq-length 9 tokens"
    shown = capsys.readouterr().err
    assert reported in shown and "the 16 positions of a sequence" in shown
    stdin(f"{prompt}\n")
    tool([*load, "--out-seq-length", "9"])
    assert reported in capsys.readouterr().err


def test_samples_follow_from_the_seed(generate, tmp_path):
    texts = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        out = tmp_path / name
        generate("--num-samples", "5", "--genfile", str(out), "--seed", seed, "--top_p", "0.9")
        samples = [json.loads(line) for line in out.read_text().splitlines()]
        assert [set(sample) for sample in samples] == [{"text", "length", "finished"}] * 5
        assert all(1 <= sample["length"] <= NEW for sample in samples)
        texts.append([sample["text"] for sample in samples])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1


def test_what_is_typed_is_continued_until_stop(generate, trained, capsys, stdin):
    typed = ["1 2", "", " ".join("1" * 16), "3", "stop", "4"]
    stdin("\n".join(typed))
    generate("--greedy")
    one, again, long, two, end = capsys.readouterr().out.split(
        "\nContext prompt (stop to exit) >>> "
    )[1:]
    assert one == expected_text(trained, "1 2")
    assert (again, end) == ("", "\n")
    assert "a prompt has 16 tokens; it needs at least 1 and at most 15" in long
    assert two == expected_text(trained, "3")
    stdin("3")  # no end of line, then nothing
    generate("--greedy")
    assert expected_text(trained, "3") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--prompt", "1", "--num-samples", "2", "--genfile", "f"], "found --prompt and --num-s"),
        (["--num-samples", "2"], "--num-samples needs --genfile"),
        (["--genfile", "f"], "--genfile needs --num-samples"),
        (["--num-samples", "-1", "--genfile", "f"], "--num-samples -1 … 0"),
        (["--prompt", "1", "--out-seq-length", "0"], "--out-seq-length 0 … 1"),
        (["--prompt", "1", "--logprobs"], "--logprobs … JSON"),
        (["--sample-output-file", "f"], "--sample-output-file … --prompt"),
        (["--prompt", "1", "--beam-width", "0"], "--beam-width 0 … 1"),
        (["--prompt", "1", "--beam-width", "2", "--greedy"], "--beam-width … --greedy"),
        (["--prompt", "1", "--length-penalty", "2"], "--length-penalty … --beam-width"),
        (["--prompt", "1", "--greedy", "--top_k", "2"], "--greedy"),
        (["--prompt", "1", "--top_k", "12"], "--top_k 12 … 11"),
        (["--prompt", "1", "--micro-batch-size", "0"], "--micro-batch-size 0 … 1"),
        (["--prompt", "1", "--fp16", "--inference-dtype", "fp16"], "fp16 … GPU"),
        (["--prompt", "1", "--model-parallel-size", "2"], "2 processes … 1"),
        (["--prompt", "1", "--world-size", "4"], "--world-size 4 … 1"),
        (["--prompt", "1 " * 20], "prompt 1: … 20 tokens"),
        (["--prompt", "1 2 3 4", "--inference-max-seq-length", "4"], "at most 4"),
        (
            ["--prompt", "1", "--inference-max-seq-length", "17"],
            "--inference-max-seq-length 17 … 2 and --max-position",
        ),
    ],
)
def test_a_contradiction_is_reported(generate, flags, reported):
    with problem(reported):
        generate(*flags)


def test_a_folder_of_transformers_is_continued_as_by_transformers(tool, tmp_path, capsys):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=EOD + 1,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    found = model.generate(
        torch.tensor([[1, 2]]), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    expected = found[0, 2:].tolist()
    if EOD in expected:
        expected = expected[: expected.index(EOD)]
    words = ["--prompt", "1 2", "--greedy", "--out-seq-length", str(NEW)]
    tool(["--load", str(tmp_path), *words])
    text = "".join(f" {token}" for token in expected)
    assert capsys.readouterr().out == f"Context:\n1 2\n\nMegatron-LM:\n{text}\n\n"
    assert len({*expected}) > 1


def test_what_cannot_be_read_is_reported(generate, tool, tmp_path):
    for content, reported in ((b"", "is empty"), (b"\xff", "can't decode byte")):
        (tmp_path / "prompts").write_bytes(content)
        with problem(reported, DataError):
            generate("--sample-input-file", str(tmp_path / "prompts"))
    with problem("--load … none does not exist", CheckpointError):
        tool(["--load", str(tmp_path / "none"), "--prompt", "1"])
    with problem("no complete checkpoint", CheckpointError):
        tool(["--load", str(tmp_path), "--prompt", "1"])
    with problem("--load is missing"):
        tool(["--prompt", "1"])
    with pytest.raises(SystemExit, match="^0$"):
        tool(["--version"])
    with pytest.raises(CheckpointError, match=r"--hidden-size +8 +16"):
        generate("--prompt", "1", "--hidden-size", "16")
    advice = "the tokenizer of … is of --tokenizer-type NullTokenizer … leave the flags"
    for words in (["--merge-file", str(tmp_path / "prompts")], ["--tiktoken-pattern", "v2"]):
        with problem(advice) as caught:
            generate("--prompt", "1", *words)
        assert f"{words[0]} means nothing to" in str(caught.value)
        with problem(f"{words[0]} means nothing to") as caught:
            generate("--prompt", "1", *words, "--tokenizer-type", "NullTokenizer")
        assert "leave the flags" not in str(caught.value)


def test_the_log_names_the_checkpoint_apart_from_the_generated_text(generate, trained, capsys):
    generate("--prompt", "1 2", "--greedy")
    written = capsys.readouterr()
    assert written.err == f"loading {trained[0] / 'global_step3'}\n"
    text = expected_text(trained, "1 2")
    assert written.out == f"Context:\n1 2\n\nMegatron-LM:\n{text}\n\n"


def test_damage_names_what_to_load_instead(tool, trained, tmp_path):
    def generate():
        tool(["--load", str(tmp_path), "--prompt", "1", "--greedy", "--out-seq-length", "2"])

    damaged = tmp_path / "global_step3"
    shutil.copytree(trained[0] / "global_step3", damaged)
    (file, *_) = damaged.glob("*_model_states.pt")
    file.write_bytes(file.read_bytes()[:-1])
    with problem("bytes instead of … copy it again", CheckpointError):
        generate()
    shutil.copytree(damaged, tmp_path / "global_step2")
    with problem(f"try --load {tmp_path / 'global_step2'}, another", CheckpointError):
        generate()
    (damaged / "manifest.json").write_text("{")
    with problem(f"try --load {tmp_path / 'global_step2'}, another", CheckpointError):
        generate()


def test_damage_names_others_at_the_url_not_in_its_mirror(monkeypatch, tmp_path):
    (tmp_path / "url.json").write_text('{"url": "s3://bucket/run"}')
    tags = ["global_step3", "global_step2"]
    monkeypatch.setattr(model_source, "remote_tags", lambda url: tags)
    others = model_source._others_beside
    assert others(tmp_path / "global_step3") == ["s3://bucket/run/global_step2"]
    assert others(tmp_path) == []  # the URL is of one checkpoint

    def fail(_):
        raise OSError("no connection")

    monkeypatch.setattr(model_source, "remote_tags", fail)
    assert others(tmp_path / "global_step3") == []


def test_the_benchmark_compares_the_same_text(capsys):
    benchmark = module_of(FILE.parents[1] / "benchmarks" / "generate.py")
    theirs = benchmark.hugging_face(layers=1, hidden=16, heads=2, vocab=32, length=12)
    ours = benchmark.engine(theirs, torch.float32, torch.device("cpu"), rows=2)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert benchmark.continue_here(ours, prompts, 9) == benchmark.continue_there(theirs, prompts, 9)
    sizes = ["--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "32"]
    benchmark.main([*sizes, "--prompt", "2", "--new", "2", "--rounds", "1", "--batches", "1", "2"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["dtype"], row["sequences at once"]) for row in rows] == [
        (dtype, batch) for dtype in ("fp32", "bf16") for batch in (1, 2)
    ]
    assert all(row["megatron"] > 0 and row["Hugging Face"] > 0 for row in rows)


def test_unwritable_files_and_wrong_stop_tokens_are_reported(generate, tmp_path):
    out = str(tmp_path / "none" / "file")
    with problem("--genfile … No such file", DataError):
        generate("--num-samples", "1", "--genfile", out)
    with problem("--sample-output-file … No such file", DataError):
        generate("--prompt", "1", "--sample-output-file", out)
    with problem("--stop-tokens 11 … 11"):
        generate("--prompt", "1", "--stop-tokens", "11")


def test_adapters_take_part(tool, trained, group, tmp_path):
    layout = ["--tensor-model-parallel-size", "2"]
    lora = ["--lora-rank", "2", "--lora-alpha", "6", "--lora-target-modules", "all-linear"]
    spec = tiny_plan(*FLAGS, *layout, *lora, world_size=2).model
    model = spread_network(spec, group)
    with torch.no_grad():
        for name, weight in filter(lambda own: is_adapter(own[0]), model.named_parameters()):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    write_checkpoint(tmp_path, model.state_dict(), *FLAGS, *layout, *lora)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(map(str, range(EOD))))
    out = tmp_path / "out.jsonl"
    flags = ["--load", str(tmp_path), "--out-seq-length", str(NEW), "--greedy"]
    tool([*flags, "--sample-input-file", str(file), "--sample-output-file", str(out)])
    found = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert found == [expected_text((tmp_path, spec, model), str(i)) for i in range(EOD)]
    assert found != [expected_text(trained, str(i)) for i in range(EOD)]
