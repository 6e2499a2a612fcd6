"""Objectives of networks with retrieval: pretraining, and instruction tuning on questions."""

from dataclasses import replace

from megatron.common.registry import KINDS, OBJECTIVES
from megatron.config.objectives import Declaration
from megatron.extensions.retro.instruct_flags import QUESTIONS

KINDS.declare(QUESTIONS, "", ())
OBJECTIVES.declare(
    "retro",
    "megatron.extensions.retro.objective",
    Declaration(
        script="pretrain_retro.py",
        network="retro",
        view="megatron.extensions.retro.data.view_of_neighbors",
        reads_neighbors=True,
    ),
)
_INSTRUCT = Declaration(script="tools/retro/sft/sft_retro.py", kind=QUESTIONS)
OBJECTIVES.declare("instruct", "megatron.extensions.retro.objective_instruct", _INSTRUCT)
OBJECTIVES.declare(
    "instruct-retro",
    "megatron.extensions.retro.objective_instruct",
    replace(_INSTRUCT, network="retro"),
)
