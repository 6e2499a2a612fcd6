"""Downstream tasks by name."""

from megatron.data.downstream.glue import GLUE
from megatron.data.downstream.race import RACE

TASKS = {task.name: task for task in (RACE, *GLUE)}
