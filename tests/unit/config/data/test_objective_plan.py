"""Which flags an objective has, and its messages."""

import pytest
from tiny import VOCAB_SIZE, tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.common.registry import OBJECTIVES
from megatron.config.objectives import declaration_of, objective_tokenizer_arguments
from megatron.config.plan import plan
from megatron.config.validation import validate
from megatron.extensions.tasks.flags import LABELLED


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (
            "gpt",
            ["--prefixlm"],
            "--prefixlm is for finetune_t0_non_causal_decoder.py; pretrain_gpt",
        ),
        ("gpt", ["--loss-on-targets-only"], "is for pretrain_prefix_lm.py; pretrain_gpt.py has no"),
        ("prefix-lm", ["--norm-target-loss"], "pretrain_prefix_lm.py has no use for it"),
        ("multitask", ["--fim-rate", "0.5"], "--fim-rate is for pretrain_gpt.py"),
        (
            "question-answering",
            [
                *("--valid-data", "a", "b", "--output-nbest-file", "c", "--save", "d"),
                *("--task", "question-answering"),
            ],
            "--output-nbest-file c holds the answers to one file, and --valid-data names 2",
        ),
        ("gpt", ["--fim-rate", "1.5"], "--fim-rate 1.5 must be from 0 to 1"),
    ],
)
def test_flags_of_another_objective_are_refused(name, flags, message):

    with pytest.raises(ConfigError, match=message):
        validate(tiny_config(*flags), world_size=1, device="cpu", objective=name)


@pytest.mark.parametrize(
    ("name", "flags", "notice"),
    [
        ("prefix-lm", ["--reweight-loss-based-on-position-frequency"], "Using loss reweighting"),
        ("multitask", [], "inputs are read from left to right; --prefixlm"),
        ("multitask", ["--prefixlm"], None),
        ("gpt", [], None),
    ],
)
def test_what_may_surprise_is_told(name, flags, notice):
    config = tiny_config(*flags)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device="cpu", objective=name)
    assert [text.startswith(notice) for text in decided.notices] == ([True] if notice else [])
    assert decided.objective.name == name


def test_every_objective_reads_its_kind_of_token_files():
    own = {
        "t5": ("--decoder-seq-length", "4"),
        "retro": ("--num-layers", "6", "--retro-chunk-length", "3"),
        "instruct": ("--data-folder", "questions"),
        "instruct-retro": ("--data-folder", "questions", "--num-layers", "6"),
    }
    labelled = {
        name for name in OBJECTIVES.with_extensions() if declaration_of(name).kind == LABELLED
    }
    decided = {
        name: plan(
            tiny_config(*own.get(name, ())),
            world_size=1,
            vocab_size=VOCAB_SIZE,
            device="cpu",
            objective=name,
        ).data.prefixes
        for name in {*OBJECTIVES.built_in} - labelled
    }
    assert decided["gpt"] == decided["prefix-lm"] == decided["retro"] == ["corpus"]
    assert decided["bert"] == decided["t5"] == ["corpus"]
    assert decided["multitask"] == ["corpus_inputs_document", "corpus_targets_document"]
    assert decided["instruct"] == decided["instruct-retro"] == []
    assert decided["sft"] == ["corpus_tokens_document", "corpus_loss_mask_document"]


def test_the_tokenizer_of_bert_and_t5_is_wordpiece_and_t5_has_sentinels():
    config = tiny_config(
        "--vocab-file", "v", without=("--tokenizer-type", "--vocab-size")
    ).tokenizer
    of = {name: objective_tokenizer_arguments(config, name) for name in ("gpt", "bert", "t5")}
    assert [each["tokenizer_type"] for each in of.values()] == [
        "GPT2BPETokenizer",
        *["BertWordPieceLowerCase"] * 2,
    ]
    assert [each.get("vocab_extra_ids") for each in of.values()] == [None, None, 100]
    for given, expected in (("7", 7), ("0", 0)):
        config = tiny_config("--vocab-extra-ids", given).tokenizer
        assert objective_tokenizer_arguments(config, "t5")["vocab_extra_ids"] == expected


@pytest.mark.parametrize(
    ("flags", "script"),
    [
        ("--mask-prob 0.2", "pretrain_bert.py and pretrain_t5.py"),
        ("--ft_neighbours 2", "tools/retro/sft/sft_retro.py"),
    ],
)
def test_flags_of_an_extension_name_its_script(flags, script):
    with pytest.raises(ConfigError, match=f"is for {script}; pretrain_gpt.py has no use for it"):
        tiny_plan(*flags.split())
