"""What tests of evaluation look at: a text, and a plain way to the probabilities of its tokens."""

import sys
from importlib import util
from pathlib import Path

import torch

LENGTH = 12
WRITTEN = (
    " = Valkyria =\n"
    'The 3,000 valley folk\'s role was well-known, as in "the war" (or so).\n'
    "The game began in 2010, and the valley's folk began to know the war in the game.\n"
)


def tool_of(name):
    """Return what a file in tasks/ does with its words."""
    file = Path(__file__).resolve().parents[1] / "tasks" / name
    spec = util.spec_from_file_location(f"tasks_{file.stem}", file)
    module = util.module_from_spec(spec)
    path = [*sys.path]
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@torch.no_grad()
def log_probabilities(model, context):
    """Return those of every next token, in float64."""
    return model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
