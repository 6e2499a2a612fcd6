"""Which flags an objective has, and its messages."""

import pytest
from problems import problem
from tiny import VOCAB_SIZE, tiny_config, tiny_plan

from megatron.config.plan.plan import plan
from megatron.config.plan.validation import validate


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
        ("gpt", ["--fim-rate", "1.5"], "--fim-rate 1.5 must be from 0 to 1"),
    ],
)
def test_flags_of_another_objective_are_refused(name, flags, message):

    with problem(message):
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


@pytest.mark.parametrize(
    ("flags", "script"),
    [
        ("--mask-prob 0.2", "pretrain_bert.py and pretrain_t5.py"),
        ("--ft_neighbours 2", "tools/retro/sft/sft_retro.py"),
    ],
)
def test_flags_of_an_extension_name_its_script(flags, script):
    with problem(f"{script} … pretrain_gpt.py"):
        tiny_plan(*flags.split())


@pytest.mark.parametrize(
    ("objective", "prefixes"),
    [
        ("gpt", ["corpus"]),
        ("prefix-lm", ["corpus"]),
        ("multitask", ["corpus_inputs_document", "corpus_targets_document"]),
        ("sft", ["corpus_tokens_document", "corpus_loss_mask_document"]),
    ],
)
def test_an_objective_reads_its_kind_of_token_files(objective, prefixes):
    assert tiny_plan(objective=objective).data.prefixes == prefixes
