"""Layers of each pipeline stage: Megatron-LM's flags and layers:N,N,…; what they cannot divide."""

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.planner.stages import stages_of

STAGES = "--pipeline-model-parallel-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
METHOD = "--pp-partition-method"
LAYOUT = "--pipeline-model-parallel-layout"
AHEAD = "--mtp-num-layers 1 --position-embedding-type rope"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"


def plan_of(flags, *, layers=8, stages=4):
    pipeline = (STAGES, str(stages), "--num-layers", str(layers), "--global-batch-size", "32")
    return tiny_plan(*pipeline, *flags.split(), world_size=stages)


def layers_of(flags, **sizes):
    """Return the transformer layers of each chunk of each stage."""
    return [
        [len(part.layers) for part in stage.parts] for stage in stages_of(plan_of(flags, **sizes))
    ]


@pytest.mark.parametrize(
    ("flags", "layers", "stages"),
    [
        (f"{METHOD} layers:1,2,3,2", 8, [[1], [2], [3], [2]]),
        (f"{METHOD} layers:0,4,4,0", 8, [[0], [4], [4], [0]]),
        (f"{METHOD} layers:0,1,1,2,1,1,1,1 {CHUNKS} 2", 8, [[0, 1], [1, 1], [1, 1], [2, 1]]),
        (f"{METHOD} layers:1,1,1,1,1,1,2,0 {CHUNKS} 2", 8, [[1, 1], [1, 1], [1, 2], [1, 0]]),
        (f"{METHOD} layers:2,3,3,0", 8, [[2], [3], [3], [0]]),
        (f"{FIRST} 1", 10, [[1], [3], [3], [3]]),
        (f"{LAST} 1", 9, [[3], [3], [2], [1]]),
        (f"{FIRST} 2 {LAST} 2", 12, [[2], [4], [4], [2]]),
        (f"{FIRST} 2 {LAST} 4 {CHUNKS} 2", 14, [[1, 1], [2, 2], [2, 2], [2, 2]]),
        (f"{EMBEDDING} {LOSS}", 14, [[3], [4], [4], [3]]),
        (EMBEDDING, 7, [[1], [2], [2], [2]]),
        (LOSS, 7, [[2], [2], [2], [1]]),
        (f"{EMBEDDING} {LOSS} {CHUNKS} 2", 14, [[1, 2], [2, 2], [2, 2], [2, 1]]),
        (
            f"{EMBEDDING} {LOSS} --num-layers-per-virtual-pipeline-stage 2",
            *(14, [[1, 2], [2, 2], [2, 2], [2, 1]]),
        ),
        (f"{LAYOUT} Et|(tt|)*2tttL", 8, [[1], [2], [2], [3]]),
        (f"{LAYOUT} E,t*3|t*3,|tt|L", 8, [[3], [3], [2], [0]]),
        (f"{LAYOUT} E(t|)*7tL", 8, [[1, 1]] * 4),
        (f"{LAYOUT} Et*2|(t|t*2|)*2t|t|tL", 11, [[2, 2], [1, 1], [2, 1], [1, 1]]),
    ],
)
def test_each_stage_has_the_layers_that_flags_give(flags, layers, stages):
    assert layers_of(flags, layers=layers) == stages


def test_the_embedding_comes_first_and_norm_and_head_stay_together_at_the_end():
    stages = stages_of(plan_of(f"{LAYOUT} Ettt|ttt|tt|L"))
    assert stages[0].has_embedding
    assert stages[3].has_final_norm and stages[3].has_head and not stages[2].has_final_norm


def test_a_network_that_is_not_divided_takes_the_flags_with_a_notice():
    for flags in (f"{FIRST} 1", f"{EMBEDDING} {LOSS}"):
        notices = plan_of(flags, stages=1).notices
        assert any(notice.startswith(flags.split()[0]) for notice in notices)
    assert plan_of(f"{LAYOUT} E{'t' * 8}L", stages=1).parallel.chunks == 1
    with problem("2 stages, and --pipeline-model-parallel-size is 1"):
        plan_of(f"{LAYOUT} Etttt|ttttL", stages=1)
    with problem("--pipeline-model-parallel-size is 1"):
        plan_of(f"{METHOD} layers:6,2", stages=1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{METHOD} layers:1,2,3", "layers:1,2,3 … 3 stages … --pipeline-model-parallel-size is 4"),
        (f"{METHOD} layers:2,2,2,3", "they have 9, and the network has 8"),
        (f"{METHOD} layers:2,2,2,", "as layers:3,4,4,3"),
        (f"{METHOD} layers:4,0,4,0", "of 4, 0, 4, 0 … only the first and the last"),
        (f"{METHOD} layers:1,2,1,2,1,1,0,0 {CHUNKS} 2", "only the first and the last"),
        (f"{LAST} 9", f"{LAST} 9 leaves no layers"),
        (f"{LAYOUT} Ett|tt|ttttL|", "write E once at its beginning"),
        (f"{LAST} 7", f"{LAST} 7 … of 1, 0, 0, 7 transformer layers"),
        (f"{FIRST} 0", f"{FIRST} 0 must be at least 1"),
        (f"{FIRST} 3 {EMBEDDING}", f"{FIRST} 3 and {EMBEDDING} … leave one"),
        (f"{METHOD} uniform {LAYOUT} Ett|tt|tt|ttL", f"uniform and {LAYOUT} … leave one"),
        (
            f"{FIRST} 2 --num-layers-per-virtual-pipeline-stage 1",
            f"--num-layers-per-virtual-pipeline-stage 1 … {CHUNKS}",
        ),
        (
            f"{LAYOUT} Ett|tt|tt|tt|L",
            "5 stages … not a multiple of --pipeline-model-parallel-size 4",
        ),
        (f"{LAYOUT} Ett|tt|tt|tmL", "m is there 1 times, and --mtp-num-layers is 0"),
        (f"{LAYOUT} Ett|tt|tt|ttL {AHEAD}", "m is there 0 times, and --mtp-num-layers is 1"),
        (f"{LAYOUT} Ett|tt|ttm|ttL {AHEAD}", "multi-token prediction is on the last stage"),
        (f"{LAYOUT} Ett|xt|tt|tL", "x is none of E"),
        (f"{LAYOUT} tt|tt|tt|ttL", "write E once at its beginning"),
        (f"{LAYOUT} Ett|tt|tt|ttL {CHUNKS} 2", f"4 stages, and {CHUNKS} 2 makes 8: leave"),
        (f"{METHOD} layers:2,2,2,2,0 --pipeline-model-parallel-split-rank 1", "leave one out"),
        (f"{LAST} 8 --lora-rank 2", "only the first and the last"),
        (f"{METHOD} layers:2,3,3,0 --lora-rank 2", "--lora-rank … leaves stage 3 without one"),
    ],
)
def test_what_does_not_divide_the_network_is_refused(flags, words):
    with problem(words):
        plan_of(flags)
