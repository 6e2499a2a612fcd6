"""Whether a run can go on from a checkpoint."""

import json
from dataclasses import replace

import pytest
from problems import problem, require_problem
from tiny import tiny_plan

from megatron.checkpointing.compare import (
    Difference,
    adds_adapters,
    extends,
    has_same_ranks,
    layout_changes,
    other_changes,
    replaces_head,
    require_reshapable,
    require_same,
    require_same_model,
    table,
)
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import defaults_of, flat


def saved(*flags, **where):
    return json.loads(json.dumps(tiny_plan(*flags, **where).to_dict()))


def test_the_same_run_resumes():
    require_same(saved("--bf16"), saved("--bf16"), "runs/global_step5")


def test_another_network_is_named_by_the_flag_that_chooses_it():
    hybrid, gpt, bert = ({"model": {"architecture": name}} for name in ("hybrid", "gpt", "bert"))
    for then, now in ((hybrid, gpt), (gpt, hybrid)):
        with pytest.raises(CheckpointError, match=r"\n  --network +\w+ +\w+$"):
            require_same_model(then, now, "f")
    with pytest.raises(CheckpointError, match=r"\n  --objective +bert +gpt$"):
        require_same_model(bert, gpt, "f")


def test_a_network_of_an_older_version_resumes():
    names = defaults_of().keys()
    older = saved("--position-embedding-type", "rotary")
    older["model"] = {name: older["model"][name] for name in older["model"].keys() - names}
    require_same(older, saved("--position-embedding-type", "rotary"), "f")
    require_same_model(older, saved("--position-embedding-type", "rotary"), "f")
    scaled = ["--position-embedding-type", "rotary", "--scale-embedding"]
    with problem("--scale-embedding", CheckpointError):
        require_same(older, saved(*scaled), "f")


def test_options_that_may_change_are_not_compared():
    flags = "--lr 0.2 --seed 7 --global-batch-size 8 --clip-grad 0.5 --eval-iters 3"
    now = saved(*flags.split())
    moved = saved("--pp-partition-method", "uniform", "--log-interval", "3")
    require_same(saved(), now, "f")
    require_same(saved(), moved, "f")


def test_another_learning_rate_is_refused_with_the_flags_that_choose():
    require_same(saved(), saved("--override-lr-scheduler"), "f", with_schedule=True)
    with pytest.raises(CheckpointError) as caught:
        require_same(
            saved(), saved("--lr", "0.2", "--lr-warmup-iters", "3"), "f", with_schedule=True
        )
    first, *differences = str(caught.value).splitlines()
    require_problem("--override-opt_param-scheduler … flags", [first])
    require_problem("--use-checkpoint-opt_param-scheduler … checkpoint", [first])
    assert differences == [
        "  flag                 in the checkpoint  now",
        "  --lr                 0.1                0.2",
        "  --lr-warmup-samples  0                  6",
    ]


def test_a_longer_run_has_another_learning_rate_unless_it_is_constant():
    longer = ["--train-iters", "20"]
    with problem("--lr-decay-samples  20 … 40 … --global-batch-size", CheckpointError):
        require_same(saved(), saved(*longer), "f", with_schedule=True)
    tokens = ["--lr-decay-tokens", "600", "--train-iters"]
    spans = [*other_changes(saved(*tokens, "10"), saved("--lr-decay-tokens", "900"))]
    assert Difference("--lr-decay-tokens", 600, 900) in spans
    constant = ["--lr-decay-style", "constant"]
    require_same(saved(*constant), saved(*constant, *longer), "f", with_schedule=True)


def test_another_rate_of_embeddings_is_named_by_its_flags():
    constant = ["--lr-decay-style", "constant", "--decoupled-lr", "0.2"]
    lower = ["--min-lr", "0.01"]
    require_same(saved(*constant), saved(*constant, *lower), "f", with_schedule=True)
    rates = ["--decoupled-lr", "0.3", "--decoupled-min-lr", "0.1"]
    with pytest.raises(CheckpointError) as caught:
        require_same(saved(), saved(*rates), "f", with_schedule=True)
    assert [line.split() for line in str(caught.value).splitlines()[2:]] == [
        ["--decoupled-min-lr", "0.0", "0.1"],
        ["--decoupled-lr", "0.0", "0.3"],
    ]


CORE = ("--sample-order", "megatron-core")


@pytest.mark.parametrize(
    ("then", "now", "order"), [((), CORE, "bigscience"), (CORE, (), "megatron-core")]
)
def test_a_run_does_not_continue_with_the_other_sample_order(then, now, order):
    then, now = saved(*then), saved(*now)
    require_same(then, then, "f", with_samples=True)
    require_same(then, now, "f")  # weights alone
    with problem(f"--sample-order {order} … --finetune", CheckpointError):
        require_same(then, now, "f", with_samples=True)


def test_all_differences_are_listed_at_once():
    flags = "--num-layers 3 --kv-channels 6 --tensor-model-parallel-size 2 --bf16 --optimizer sgd"
    with pytest.raises(CheckpointError) as caught:
        require_same(saved(), saved(*flags.split(), world_size=4), "runs/global_step5")
    first, *differences = str(caught.value).splitlines()
    require_problem("runs/global_step5 … --use-checkpoint-args … --load", [first])
    assert differences == [
        "  flag            in the checkpoint  now",
        "  --kv-channels   4                  6",
        "  --num-layers    2                  3",
        "  --bf16, --fp16  fp32               bf16",
        "  --optimizer     adam               sgd",
    ]


def test_changes_of_layout_and_of_the_run_are_separate():
    then = saved("--tensor-model-parallel-size", "2", world_size=4)
    require_same(saved(), then, "f")
    assert layout_changes(saved(), then) == [
        Difference("--pad-vocab-size-to", 12, 16),
        Difference("parallel.data", 1, 2),
        Difference("--tensor-model-parallel-size", 1, 2),
    ]
    assert layout_changes(then, then) == []
    assert has_same_ranks(then, then)
    assert not has_same_ranks(saved(), then)
    divided = saved("--zero-stage", "2")
    assert layout_changes(saved(), divided) == [Difference("--zero-stage", 0, 2)]
    assert has_same_ranks(saved(), divided)


def test_parameters_in_other_groups_need_a_checkpoint_to_be_read_by_name():
    for flags, difference in (
        (["--qk-layernorm", "--apply-wd-to-qk-layernorm"], "--apply-wd-to-qk-layernorm"),
        (["--qk-layernorm", "--decoupled-lr", "0.1"], "optimizer.embeddings_apart"),
    ):
        then, now = saved("--qk-layernorm"), saved(*flags)
        assert [each.name for each in layout_changes(then, now)] == [difference]
        assert difference not in {each.name for each in other_changes(then, now)}


def test_where_stages_are_cut_is_part_of_the_layout_of_a_pipeline():
    method = ["--pp-partition-method", "type:transformer|embedding"]
    assert layout_changes(saved(), saved(*method)) == []
    pipeline = ["--pipeline-model-parallel-size", "2", "--num-layers", "4", "--bf16"]
    plain, even, uneven = (
        saved(*pipeline, *method, world_size=2)
        for method in (
            [],
            ["--pp-partition-method", "layers:2,2"],
            ["--pp-partition-method", "layers:1,3"],
        )
    )
    assert layout_changes(plain, even) == layout_changes(even, plain) == []
    (cut,) = layout_changes(plain, uneven)
    assert cut.name == "--pp-partition-method"


def test_chunks_of_stages_are_part_of_the_layout():
    stages = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
    batch = ("--global-batch-size", "4")
    plain = saved(*stages, *batch, world_size=2)
    chunked = saved(*stages, *batch, "--num-virtual-stages-per-pipeline-rank", "2", world_size=2)
    (change,) = layout_changes(plain, chunked)
    assert change == Difference("--num-virtual-stages-per-pipeline-rank", 1, 2)
    # Checkpoints of older versions have one chunk a stage.
    older = plain | {"parallel": {k: v for k, v in plain["parallel"].items() if k != "chunks"}}
    assert layout_changes(older, plain) == []
    assert layout_changes(older, chunked) == [change]


def test_buckets_of_bf16_are_part_of_the_layout_of_several_replicas():
    two = {"world_size": 2}
    bf16 = ("--bf16", "--global-batch-size", "4")
    now, smaller = saved(*bf16, **two), saved(*bf16, "--zero-allgather-bucket-size", "7", **two)
    (change,) = layout_changes(now, smaller)
    assert change == Difference("parallel.bucket_size", 50_000_000, 7)
    # Checkpoints of older versions have whole groups, as where one replica steps or none reduces early.
    older = now | {"parallel": {k: v for k, v in now["parallel"].items() if k != "bucket_size"}}
    (change,) = layout_changes(older, now)
    assert change == Difference("parallel.bucket_size", 0, 50_000_000)
    for flags in (["--bf16"], ["--zero-stage", "1"]):
        assert saved(*flags)["parallel"]["bucket_size"] == 0
    older["optimizer"] = older["optimizer"] | {"name": "adam8bit"}
    with problem("immediate_grad_update", CheckpointError):
        require_reshapable(older, [change], "f", with_optimizer=True)


def test_unsupported_resharding_is_refused_with_the_reason():
    changes = [Difference("--tensor-model-parallel-size", 1, 2)]
    require_reshapable(saved(), changes, "f", with_optimizer=True)
    blocks = saved()
    blocks["optimizer"]["name"] = "adam8bit"
    require_reshapable(blocks, [], "f", with_optimizer=True)
    with problem("8-bit state … --no-load-optim", CheckpointError):
        require_reshapable(blocks, changes, "f", with_optimizer=True)
    require_reshapable(blocks, changes, "f", with_optimizer=False)


def test_a_field_that_only_one_of_them_has_is_a_difference():
    then, now = saved(), saved()
    then["model"]["rotary"] = True
    del now["model"]["head_dim"]
    with pytest.raises(CheckpointError) as caught:
        require_same(then, now, "f")
    assert str(caught.value).splitlines()[2:] == [
        "  --kv-channels  4                  -",
        "  model.rotary   True               -",
    ]


def test_fields_without_weights_may_change_and_are_listed():
    flags = ["--attention-dropout", "0", "--seed", "99", "--lr", "0.2", "--weight-decay", "0.7"]
    then, now = saved(), saved(*flags)
    require_same(then, now, "f")
    assert list(other_changes(then, now)) == [
        Difference("--attention-dropout", 0.1, 0.0),
        Difference("--seed", 1234, 99),
        Difference("--lr", 0.1, 0.2),
        Difference("--end-weight-decay", 0.01, 0.7),
        Difference("--weight-decay", 0.01, 0.7),
    ]
    assert list(other_changes(then, then)) == []


def test_options_without_effect_on_a_step_are_not_listed():
    ends = "--exit-interval 3 --exit-duration-in-mins 5 --data-cache-path elsewhere"
    assert list(other_changes(saved(), saved(*ends.split()))) == []
    longer = list(other_changes(saved(), saved("--train-iters", "20")))
    assert [each.name for each in longer] == ["--train-iters", "--lr-decay-samples"]


def test_another_network_is_refused_with_its_differences():
    flags = "--position-embedding-type rotary --swiglu --group-query-attention --window-size 2"
    with pytest.raises(CheckpointError) as caught:
        require_same_model(saved(), saved(*flags.split()), "f")
    assert [line.split() for line in str(caught.value).splitlines()[2:]] == [
        ["--activation", "gelu_tanh", "swiglu"],
        ["--num-query-groups", "2", "1"],
        ["--position-embedding-type", "learned_absolute", "rotary"],
        ["--rotary-base", "0.0", "10000.0"],
        ["model.rotary_dim", "0", "4"],
        ["model.window", "0", "3"],
    ]


def test_a_network_with_the_flags_of_a_plugin_equals_its_record():
    network = {"model": flat(replace(tiny_plan().model, own_flags=(("steep", 2.0),)))}
    require_same_model(json.loads(json.dumps(network)), network, "run")
    other = {"model": {**network["model"], "own_flags": (("steep", 1.5),)}}
    with problem("own_flags.steep  2.0 … 1.5", CheckpointError):
        require_same_model(json.loads(json.dumps(network)), other, "run")


def test_only_a_learned_table_limits_the_positions_of_another_run():
    longer = ["--max-position-embeddings", "9"]
    with problem("--max-position-embeddings  6 … 9", CheckpointError):
        require_same_model(saved(), saved(*longer), "f")
    alibi = ["--position-embedding-type", "alibi"]
    then, now = saved(*alibi), saved(*alibi, *longer)
    require_same_model(then, now, "f")
    expected = Difference("--max-position-embeddings", 6, 9)
    assert list(other_changes(then, now)) == [expected]


def test_for_generation_the_layout_may_differ():
    require_same_model(saved(), saved("--bf16", world_size=2), "f")
    with problem("f … another network … --num-layers  2 … 3", CheckpointError):
        require_same_model(saved(), saved("--num-layers", "3"), "f")


def test_a_table_has_columns():
    rows = [Difference("--lr", 0.1, ""), Difference("--position-embedding-type", None, "rotary")]
    assert table(rows).splitlines() == [
        "  flag                       in the checkpoint  now",
        "  --lr                       0.1                -",
        "  --position-embedding-type  -                  rotary",
    ]


def test_long_values_are_cut_to_where_they_differ():
    then, now = ([{"prefix": "corpus/" + "x" * 60 + end + "y" * 60}] for end in "ab")
    _, row = table([Difference("data.train", then, now)]).splitlines()
    assert len(row) <= 100
    assert [text.strip("xy… ") for text in row.split()[1:]] == ["a", "b"]


def test_the_learning_rate_is_compared_once_the_network_is_the_same():
    other = saved("--num-layers", "3", "--hidden-size", "16", "--lr", "0.2")
    with pytest.raises(CheckpointError) as caught:
        require_same(saved(), other, "f", with_schedule=True)
    rows = [line.split()[0] for line in str(caught.value).splitlines()[1:]]
    assert rows == ["flag", "--hidden-size", "--num-layers"]
    with problem("longer run … --lr … 0.1", CheckpointError):
        require_same(saved(), saved("--lr", "0.2"), "f", with_schedule=True)


def test_another_choice_of_trained_weights_is_refused_with_the_optimizer_alone():
    now, then = saved("--freeze", "embedding"), saved()
    del then["optimizer"]["frozen"]  # as in checkpoints of older versions
    require_same(then, saved(), "F")
    require_same(then, now, "F", with_optimizer=False)
    with problem("--freeze", CheckpointError):
        require_same(then, now, "F")


def test_adapters_are_put_beside_the_weights_of_a_base_and_kept():
    lora = ["--lora-rank", "2", "--lora-target-modules", "all-linear"]
    base, own = saved(), saved(*lora)
    now = saved(*lora, "--lora-dropout", "0.5")
    older = {**base, "model": {k: v for k, v in base["model"].items() if "lora" not in k}}
    require_same(own, now, "folder")
    for then in (base, older):
        require_same(then, now, "folder", with_optimizer=False)
        require_same(then, base, "folder")
        assert adds_adapters(then, now)
        with problem("--lora-rank", CheckpointError):
            require_same(then, now, "folder")
    with problem("--lora-rank", CheckpointError):
        require_same(own, base, "folder", with_optimizer=False)
    assert not adds_adapters(own, now)


def test_retrieval_is_added_to_a_gpt_of_the_same_sizes():
    sizes = ["--num-layers", "9", "--retro-chunk-length", "3", "--max-position-embeddings", "6"]
    gpt = saved("--num-layers", "9", "--max-position-embeddings", "6")
    retro = saved(*sizes, objective="retro")
    require_same(gpt, retro, "folder", with_optimizer=False)
    assert extends(gpt, retro)
    assert not extends(retro, retro)
    with problem("--retro-add-retriever", CheckpointError):
        require_same(gpt, retro, "folder")
    with problem("--retro-add-retriever", CheckpointError):
        require_same(retro, gpt, "folder", with_optimizer=False)
    with problem("--num-layers  2 … 9", CheckpointError):
        require_same(saved(), retro, "folder", with_optimizer=False)
    gated = saved(*sizes, "--retro-attention-gate", "0", objective="retro")
    require_same(retro, gated, "folder")


def of_task(task, *flags):
    words = ("--task", task, "--train-data", "a", *flags)
    return saved(*words, without=("--data-path",), objective="classification")


def test_the_head_of_another_task_is_another_head():
    assert not replaces_head(of_task("QNLI"), of_task("QNLI"))
    # Also where it has as many outputs, or the same names for them.
    for task in ("MNLI", "QQP", "RTE"):
        assert replaces_head(of_task("QNLI"), of_task(task))
        with problem(f"--task … QNLI … {task}", CheckpointError):
            require_same(of_task("QNLI"), of_task(task), "f")
        require_same(of_task("QNLI"), of_task(task), "f", with_optimizer=False)
    # One that was imported has labels in place of a task.
    imported = of_task("text-classification", "--labels", "entailment", "not_entailment")
    assert not replaces_head(imported, of_task("RTE"))
    assert replaces_head(imported, of_task("QQP"))
    of_older_version = of_task("QNLI")
    of_older_version["objective"]["own"]["task"] = ""
    assert not replaces_head(of_older_version, of_task("RTE"))


def test_files_of_a_task_may_change():
    then, now = of_task("QNLI", "--valid-data", "b"), of_task("QNLI", "--valid-data", "c")
    assert [*other_changes(then, now)] == []


def test_the_length_of_a_run_of_epochs_is_named():
    then, now = of_task("QNLI"), of_task("QNLI", "--train-iters", "20")
    with problem("--epochs … length of the run", CheckpointError):
        require_same(then, now, "f", with_schedule=True)


def test_a_run_without_adapters_is_given_the_way_to_merge_them():
    with problem("LoRA adapters … to_hf.py … from_hf.py", CheckpointError):
        require_same(saved("--lora-rank", "2"), saved(), "f", with_optimizer=False)
