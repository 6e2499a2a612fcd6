"""Flags of retrieval: which layers attend to neighbors, sizes, and what is refused."""

from copy import deepcopy

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.compare import other_changes
from megatron.common.errors import ConfigError
from megatron.config.plan.plan import plan
from megatron.extensions.retro.flags import retro_layer_numbers
from megatron.training.start_checks import require_startable

LAYERS = "--num-layers", "9", "--retro-chunk-length", "3"


def retro_plan(*flags):
    return tiny_plan(*LAYERS, *flags, objective="retro")


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        (5, ()),
        (6, (6,)),
        (9, (6, 9)),
        (12, (6, 9, 12)),
        (15, (6, 9, 12, 15)),
        (16, (9, 12, 15)),
        (24, (9, 12, 15, 18, 21, 24)),
        (32, (9, 12, 15, 18, 21, 24, 27, 30)),
    ],
)
def test_every_third_layer_attends_to_neighbors(layers, numbers):
    assert retro_layer_numbers(layers) == numbers


def test_the_network_of_default_flags():
    spec = retro_plan().model
    assert (spec.architecture, spec.own.retro_layers) == ("retro", (6, 9))
    assert (spec.own.retro_chunk_length, spec.own.retro_num_neighbors) == (3, 2)
    assert (spec.own.retro_retrieved_length, spec.positions.max_position_embeddings) == (6, 6)
    assert (spec.own.retro_encoder_layers, spec.own.retro_attention_gate) == (2, 1.0)
    assert (spec.own.retro_encoder_hidden_dropout, spec.own.retro_encoder_attention_dropout) == (
        0.1,
        0.1,
    )
    assert (spec.own.final_norm, spec.own.retro_normed_residual) == (True, False)


def test_every_flag_reaches_the_network():
    spec = retro_plan(
        *("--retro-num-neighbors", "3", "--retro-num-retrieved-chunks", "4"),
        *("--retro-encoder-layers", "1", "--retro-attention-gate", "0.5"),
        *("--retro-encoder-hidden-dropout", "0", "--retro-encoder-attention-dropout", "0.2"),
        *("--retro-normed-residual", "--retro-no-final-norm"),
    ).model
    assert (spec.own.retro_num_neighbors, spec.own.retro_retrieved_length) == (3, 12)
    assert spec.positions.max_position_embeddings == 12
    assert (spec.own.retro_encoder_layers, spec.own.retro_attention_gate) == (1, 0.5)
    assert (spec.own.retro_encoder_hidden_dropout, spec.own.retro_encoder_attention_dropout) == (
        0.0,
        0.2,
    )
    assert (spec.own.final_norm, spec.own.retro_normed_residual) == (False, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--retro-chunk-length", "4"), "--seq-length 6 … --retro-chunk-length 4"),
        (("--retro-chunk-length", "0"), "--retro-chunk-length 0 … 1"),
        (("--retro-num-neighbors", "0"), "--retro-num-neighbors 0 … 1"),
        (("--retro-encoder-layers", "0"), "--retro-encoder-layers 0 … 1"),
        (("--retro-encoder-hidden-dropout", "1"), "dropout 1.0 … less than 1"),
        (("--num-layers", "5"), "--num-layers 5 … 6"),
        (
            ("--max-position-embeddings", "7", "--retro-num-retrieved-chunks", "3"),
            "--max-position-embeddings 7 … 9 tokens",
        ),
        (("--dataloader-type", "cyclic"), "--dataloader-type cyclic"),
        (("--position-embedding-type", "alibi"), "alibi … retrieval"),
        (("--window-size", "3"), "--window-size … retrieval"),
        (("--num-experts", "2"), "--num-experts … retrieval"),
        (("--reset-attention-mask",), "--reset-attention-mask … retrieval"),
    ],
)
def test_what_retrieval_does_not_have_is_refused(flags, message):
    with problem(message):
        retro_plan(*flags)


def test_sequence_parallelism_divides_neighbors_evenly():
    flags = "--sequence-parallel", "--tensor-model-parallel-size", "2"
    tiny_plan(*LAYERS, *flags, objective="retro", world_size=2)
    with problem("9 tokens … remainder"):
        more = *flags, "--retro-num-retrieved-chunks", "3"
        tiny_plan(*LAYERS, *more, objective="retro", world_size=2)


def test_training_needs_a_project():
    with problem("--retro-project-dir"):
        require_startable(tiny_config(*LAYERS), world_size=1, objective="retro")


def test_flags_of_retrieval_need_it():
    with pytest.raises(ConfigError) as raised:
        plan(
            tiny_config("--retro-add-retriever", "--retro-num-neighbors", "3"),
            **{"world_size": 1, "vocab_size": 11, "device": "cpu"},
        )
    assert [*raised.value.problems] == [
        "--retro-add-retriever is for pretrain_retro.py: leave it out",
        "--retro-num-neighbors is for pretrain_retro.py with --retro-add-retriever: leave it out",
    ]


@pytest.mark.parametrize(
    ("objective", "flags", "prefixes"),
    [
        ("retro", ("--num-layers", "6", "--retro-chunk-length", "3"), ["corpus"]),
        ("instruct", ("--data-folder", "questions"), []),
        ("instruct-retro", ("--data-folder", "questions", "--num-layers", "6"), []),
    ],
)
def test_an_objective_reads_its_kind_of_token_files(objective, flags, prefixes):
    assert tiny_plan(*flags, objective=objective).data.prefixes == prefixes


def test_another_project_is_reported_by_its_fields():
    flags = ("--num-layers", "6", "--retro-chunk-length", "3")
    then = tiny_plan(*flags, objective="retro").to_dict()
    now = deepcopy(then)
    now["objective"]["own"]["project_dir"] = "b"
    (found,) = other_changes(then, now)
    assert (found.name, found.then, found.now) == ("--retro-project-dir", "", "b")


@pytest.mark.parametrize(
    ("objective", "flags"),
    [
        ("retro", LAYERS),
        ("instruct", ("--data-folder", "questions")),
        ("instruct-retro", ("--data-folder", "questions", "--num-layers", "6")),
    ],
)
def test_tokens_may_weigh_the_same_in_a_global_batch(objective, flags):
    plan = tiny_plan(*flags, "--calculate-per-token-loss", objective=objective)
    assert plan.masks.per_token_loss
