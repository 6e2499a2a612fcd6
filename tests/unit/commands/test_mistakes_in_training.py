"""Mistakes that people make with a training command: one message names flag and value.

They are reported before torch is imported, all at once, and end with exit code 2.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import write_checkpoint
from tiny import tiny_argv, tiny_objective

from megatron.common.errors import (
    ConfigError,
    DataError,
    ExitCode,
    MegatronError,
    UnreadableCheckpointError,
)
from megatron.config.config import parse_config
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter
from megatron.tokenizer.types.hugging_face import load_with_transformers
from megatron.training.entry import train_from
from megatron.training.start_checks import require_startable

REPOSITORY = Path(__file__).resolve().parents[3]
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "11", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a corpus, a run and files that are wrong."""
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetWriter("corpus", "i4") as out:
        out.append([1, 2, 3])
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("away")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}')
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "mask.yaml").write_text("mask_prob: 0.2\n")
    (tmp_path / "small.yaml").write_text("network:\n  num-layers: 2\n  num-layer: 3\n")
    (tmp_path / "tab.yaml").write_text("lr: 1\n\tseed: 2\n")
    (tmp_path / "comma.json").write_text('{"train_batch_size": 2,\n}')
    (tmp_path / "top.json").write_text(json.dumps({"zero_optimisation": {"stage": 2}}))
    (tmp_path / "below.json").write_text(json.dumps({"zero_optimization": {"stge": 2}}))
    (tmp_path / "batch.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    return tmp_path


def message(words, processes, objective="gpt"):
    with pytest.raises(MegatronError) as caught:
        config, _ = parse_config(words)
        require_startable(config, world_size=processes, objective=objective)
    assert caught.value.exit_code == ExitCode.MISUSED
    return str(caught.value)


MISTAKES = [
    ("--load model --lr-warmup-iters 99", ["--load model is", "from_hf.py --load model"]),
    ("--global-batch-size 7 --micro-batch-size 4", ["--global-batch-size 7", "write 8"]),
    ("--num-layer 3", ["--num-layer;", "--num-layers"]),
    (
        "--decoder-first-pipeline-layers 2",
        ["--decoder-first-pipeline-layers", "did you mean --decoder-first-pipeline-num-layers?"],
    ),
    ("--config small.yaml", ["small.yaml, line 3", "num-layer;", "num-layers?"]),
    ("--config tab.yaml", ["tab.yaml", "line 2"]),
    ("--config none.yaml", ["--config none.yaml", "No such file"]),
    ("--hidden-size 9", ["--hidden-size 9", "--num-attention-heads 2"]),
    ("--global-batch-size 5", ["--global-batch-size 5", "--micro-batch-size 2"]),
    (
        "--tensor-model-parallel-size 2",
        ["multiple of 2 processes, got 1", "--tensor-model-parallel-size 2"],
    ),
    ("--world-size 4", ["--world-size 4", "1 process"]),
    ("--world-size -1", ["--world-size -1", "at least 1"]),
    ("--fp16", ["--fp16", "--bf16"]),
    ("--deepspeed_config none.json", ["--deepspeed_config none.json", "No such file"]),
    ("--deepspeed_config comma.json", ["comma.json", "line 2"]),
    ("--deepspeed_config top.json", ["top.json", "zero_optimisation", "zero_optimization?"]),
    ("--deepspeed_config below.json", ["below.json", "zero_optimization.stge", "stage?"]),
    ("--deepspeed_config batch.json", ["batch.json", "gradient_clipping is 0.5", "--clip-grad is"]),
    ("--max-position-embeddings 5", ["--max-position-embeddings 5", "--seq-length 6"]),
    ("--data-path none", ["no token files at none", "none.bin", "none.idx"]),
    ("--data-path corpus.bin", ["corpus.bin", "without its suffix", "did you mean corpus?"]),
    (
        "--data-path texts.jsonl",
        ["texts.jsonl is a file of text", "--input texts.jsonl", "--data-path texts_text_document"],
    ),
    ("--data-path 0.3 corpus 0.7", ["--data-path", "3 values"]),
    ("--train-samples 3", ["--train-iters", "--train-samples"]),
    ("--tokenizer-type Bert", ["--tokenizer-type Bert", "GPT2BPETokenizer"]),
    ("--load run", ["--load run", "no such directory", "did you mean runs?"]),
    ("--save file", ["--save file", "is a file"]),
    ("--save file/run", ["--save file/run", "file is a file"]),
    ("--save link/run", ["--save link/run", "link is a link to away, which is not there"]),
    ("--tensorboard-dir file/tb", ["--tensorboard-dir file/tb", "file is a file"]),
    ("--codecarbon-dir link", ["--codecarbon-dir link", "a link to away, which is not there"]),
    ("--zero-stage 7", ["--zero-stage 7", "0, 1, 2, 3"]),
    ("--lr fast", ["--lr", "'fast' is not a finite number"]),
    ("--lr -1", ["--lr -1.0", "must not be negative"]),
    ("more.yaml", ["unexpected argument more.yaml; write --config more.yaml"]),
    ("--data-path runs", ["runs is a folder of text", "--data-path runs_text_document"]),
    ("--num-layers", ["--num-layers", "expected one argument"]),
    (
        "--hybrid-layer-pattern -M-M",
        ["--hybrid-layer-pattern", "expected one argument; write --hybrid-layer-pattern=-M-M"],
    ),
    ("--seed 1.5", ["--seed", "'1.5'"]),
    ("--lr-decay-style cosin", ["--lr-decay-style cosin", "did you mean cosine"]),
    ("num-layers=2", ["num-layers=2", "write it as --NAME VALUE"]),
    ("--save model", ["--save model is the folder of a model of Hugging Face", "from_hf.py"]),
    # Flags of another objective.
    (
        "--mask-prob 0.2",
        ["--mask-prob is for pretrain_bert.py and pretrain_t5.py; pretrain_gpt.py"],
    ),
    (
        "--mask_prob 0.2",
        ["--mask-prob is for pretrain_bert.py and pretrain_t5.py; pretrain_gpt.py"],
    ),
    ("--config mask.yaml", ["--mask-prob is for pretrain_bert.py and pretrain_t5.py"]),
    ("--decoder-num-layers 2", ["--decoder-num-layers is for pretrain_t5.py"]),
    ("--decoder_num_layers=2", ["--decoder-num-layers is for pretrain_t5.py"]),
    ("--retro-num-neighbors 3", ["--retro-num-neighbors is for pretrain_retro.py"]),
    ("--retro_num_neighbors 3", ["--retro-num-neighbors is for pretrain_retro.py"]),
]


@pytest.mark.parametrize(("flags", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_message_with_flag_and_value(folder, flags, words):
    output = message([*tiny_argv(*TOKENIZER), *flags.split()], 1)
    for word in words:
        assert word in output
    assert "[Errno" not in output
    assert len(output.splitlines()) == 1


def test_no_flags_name_what_is_required(folder):
    output = message([], 1)
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--lr"):
        assert flag in output


@pytest.mark.parametrize(
    ("prefix", "part"),
    [
        ("chat_tokens_document", "give the prefix alone: chat"),
        ("chat_loss_mask_document.bin", "give the prefix alone: chat"),
        ("corpus", "corpus holds documents, and this program needs the token files PREFIX_tokens_"),
        ("none", "tools/preprocess_data.py --conversations makes them, for --data-path none"),
    ],
)
def test_files_that_finetuning_does_not_read_are_named(folder, prefix, part):
    for name in ("chat_tokens_document", "chat_loss_mask_document"):
        with IndexedDatasetWriter(name, "i4") as out:
            out.append([1, 2, 3])
    output = message([*tiny_argv(*TOKENIZER), "--data-path", prefix], 1, "sft")
    assert part in output
    assert len(output.splitlines()) == (1 if prefix != "none" else 2)


def test_conversations_in_json_lines_are_to_be_preprocessed(folder):
    flags = tiny_argv(*TOKENIZER, "--sft", "--data-path", "texts.jsonl")
    output = message(flags, 1, "sft")
    assert "tools/preprocess_data.py --conversations --input texts.jsonl" in output
    assert output.rstrip().endswith("then write --data-path texts")


def test_random_tokens_need_no_files_of_the_default_tokenizer(folder):
    output = message(tiny_argv("--mock-data", without=("--data-path",)), 1)
    assert "write --tokenizer-type NullTokenizer and the number of tokens in --vocab-size" in output


def test_layouts_are_compared_with_the_launcher(folder):
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    output = message([*tiny_argv(*TOKENIZER), *layout], 2)
    assert "needs a multiple of 4 processes, got 2" in output
    assert "deepspeed --num_gpus 4" in output


def test_paths_and_flags_are_told_together(folder):
    flags = "--data-path none --load run --save file --clip-grad -1 --deepspeed_config top.json"
    output = message([*tiny_argv(*TOKENIZER), *flags.split()], 1)
    for part in ("none.bin", "--load run", "--save file", "--clip-grad -1", "zero_optimisation"):
        assert part in output


def test_a_right_command_has_no_problems(folder):
    flags = "--data-path corpus --load runs --save new/run --save-interval 5"
    config, _ = parse_config([*tiny_argv(*TOKENIZER), *flags.split()])
    require_startable(config, world_size=1, objective="gpt")


def test_rank_0_alone_needs_the_folder_of_scalars(folder):
    config, _ = parse_config(
        [*tiny_argv(*TOKENIZER), "--data-path", "corpus", "--tensorboard-dir", "file"]
    )
    with pytest.raises(ConfigError, match="--tensorboard-dir file"):
        require_startable(config, world_size=1, objective="gpt")
    require_startable(config, world_size=1, objective="gpt", is_rank_0=False)


def test_scalars_may_go_to_a_url(folder):
    (folder / "s3:").touch()  # what the URL would be as a path
    flags = ["--data-path", "corpus", "--tensorboard-dir", "s3://bucket/scalars"]
    config, _ = parse_config([*tiny_argv(*TOKENIZER), *flags])
    require_startable(config, world_size=1, objective="gpt")


def test_a_folder_that_cannot_be_read_is_listed_with_the_other_problems(folder, monkeypatch):
    (folder / "runs" / "global_step5").mkdir()

    def fail(directory):
        raise UnreadableCheckpointError(f"{directory} cannot be read: Stale file handle")

    monkeypatch.setattr("megatron.training.start_checks.published_tags", fail)
    words = [*tiny_argv(*TOKENIZER), "--data-path", "corpus", "--save", "runs", "--clip-grad", "-1"]
    found = message(words, 1)
    assert "--clip-grad -1" in found
    assert "--save runs: runs cannot be read: Stale file handle" in found
    # A run that resumes from there does not read it for this.
    words = [*tiny_argv(*TOKENIZER), "--data-path", "corpus", "--save", "runs", "--load", "runs"]
    require_startable(parse_config(words)[0], world_size=1, objective="gpt")


def test_a_folder_to_save_to_must_be_readable(folder, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.R_OK)
    words = [*tiny_argv(*TOKENIZER), "--data-path", "corpus", "--save", "runs"]
    assert message(words, 1) == "--save runs cannot be read; give another directory"
    words[-1] = "runs/new"
    require_startable(parse_config(words)[0], world_size=1, objective="gpt")


@pytest.mark.parametrize("checkpoint", ["global_step5", "initial/global_step5", "staging-initial"])
def test_a_run_continues_where_its_model_was_exported_to(folder, checkpoint):
    (folder / "model" / checkpoint).mkdir(parents=True)
    config, _ = parse_config(
        [*tiny_argv(*TOKENIZER), *("--data-path", "corpus"), "--save", "model"]
    )
    require_startable(config, world_size=1, objective="gpt")


def test_a_name_on_the_hub_is_not_looked_for_among_the_files(folder):
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "org/model"]
    words = [*tiny_argv(*tokenizer, "--device", "cpu"), "--data-path", "corpus"]
    config, _ = parse_config(words)
    require_startable(config, world_size=1, objective="gpt")


def test_what_depends_on_the_device_waits_for_it(folder, monkeypatch):
    monkeypatch.setattr("megatron.training.start_checks._GPU_FILES", ("/dev/null",))
    words = [*tiny_argv(*TOKENIZER[:-2]), "--data-path", "corpus", "--fp16"]
    config, _ = parse_config(words)
    require_startable(config, world_size=1, objective="gpt")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--data-path none --deepspeed_config below.json", ["zero_optimization.stge", "none.bin"]),
        ("--load saved --seq-length 5", ["saved/global_step3", "--max-position-embeddings  6   "]),
        (
            "--load saved --hidden-size 16 --clip-grad 2",
            ["saved/global_step3", "--hidden-size", "8", "16", "--use-checkpoint-args"],
        ),
        (
            "--load saved --num-layers 3 --lr 0.2",
            ["--num-layers  2                  3\n[]"],
        ),
        ("--load saved --lr 0.2", ["saved/global_step3", "--lr", "0.1", "0.2", "--override-"]),
        ("--save saved", ["--save saved holds checkpoints already (the newest is global_step3)"]),
    ],
)
def test_torch_is_not_imported_for_it(folder, flags, parts):
    write_checkpoint(folder / "saved", {}, *TOKENIZER)
    program = (
        "import sys\n"
        "from megatron.training.entry import train_from\n"
        "from megatron.common.errors import MegatronError\n"
        "try:\n"
        "    train_from(sys.argv[1:], 'gpt', description='')\n"
        "except MegatronError as error:\n"
        "    print(error)\n"
        "print(sorted({'torch', 'deepspeed'} & sys.modules.keys()))\n"
    )
    words = [*tiny_argv(*TOKENIZER), *flags.split()]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    for part in parts:
        assert part in done.stdout


def test_another_objective_does_not_continue_a_run(folder):
    write_checkpoint(folder / "saved", {}, *TOKENIZER)
    for name in ("chat_tokens_document", "chat_loss_mask_document"):
        with IndexedDatasetWriter(name, "i4") as out:
            out.append([1, 2, 3])
    words = [*tiny_argv(*TOKENIZER), "--load", "saved", "--data-path", "chat"]
    output = message(words, 1, "sft")
    assert "iteration 3 by a run with objective gpt, and this run has objective sft" in output
    assert "write --finetune" in output
    config, _ = parse_config([*words, "--finetune"])
    require_startable(config, world_size=1, objective="sft")


def test_a_vocabulary_that_has_moved_names_the_checkpoint_that_says_where_it_was(folder):
    from megatron.inference.loading.loaded_model import tokenizer_and_spec

    flags = ["--vocab-file", "gone.json", "--merge-file", "gone.txt"]
    config, _ = parse_config([*tiny_argv(), *flags])
    source = SimpleNamespace(
        config=config,
        manifest=SimpleNamespace(objective=tiny_objective("gpt")),
        folder=Path("runs/global_step5"),
    )
    with pytest.raises(MegatronError) as caught:
        tokenizer_and_spec(source)
    assert caught.value.exit_code == ExitCode.MISUSED
    for part in ("--vocab-file gone.json", "runs/global_step5", "give --vocab-file"):
        assert part in str(caught.value)


@pytest.mark.parametrize("word", ["--help", "--no-such-flag"])
def test_help_and_wrong_flags_import_no_numpy(word):
    program = (
        "import sys\n"
        "from megatron.training.entry import train_from\n"
        "from megatron.common.errors import ConfigError\n"
        "try:\n"
        "    train_from(sys.argv[1:], 'gpt', description='')\n"
        "except (ConfigError, SystemExit):\n"
        "    print('LOADED', sorted({'numpy', 'torch'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, word], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.endswith("LOADED []\n"), done.stderr


def test_missing_sizes_may_come_from_the_checkpoint(folder):
    words = ["--load", "model", "--data-path", "corpus"]
    with pytest.raises(ConfigError) as caught:
        train_from(words, "gpt", description="")
    assert "from_hf.py --load model" in str(caught.value)
    (folder / "runs" / "global_step2").mkdir()
    (folder / "runs" / "global_step2" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        train_from(["--load", "runs", *words[2:]], "gpt", description="")
    assert "--use-checkpoint-args" in str(caught.value)


def test_a_name_server_that_does_not_answer_is_waited_for_a_while(monkeypatch, caplog):
    answered = threading.Event()
    monkeypatch.setattr("megatron.tokenizer.types.hugging_face._LOOKUP_S", 0.01)
    monkeypatch.setattr("megatron.tokenizer.types.hugging_face.getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answered.wait() and [])
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _, **given: given)
    assert load_with_transformers("org/model", {})["local_files_only"]
    answered.set()
    assert "no name server" in caplog.text


def test_the_hub_without_a_network_is_not_asked_again_and_again(monkeypatch, tmp_path):
    def fails(*words):
        raise OSError("Name or service not known")

    def finds(name, **options):
        raise OSError(f"local: {options['local_files_only']}.")

    monkeypatch.setattr(
        "megatron.tokenizer.types.hugging_face.getproxies", lambda: {"no": "localhost"}
    )
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", finds)
    with pytest.raises(DataError, match="team/model: local: True; give a directory"):
        load_with_transformers("team/model", {})
