"""A request while the engine works on it."""

import random

from megatron.inference.engine.request import Request


class ActiveSequence:
    """A request and the tokens that the engine has added to its prompt."""

    def __init__(self, number: int, request: Request):
        self.number, self.request = number, request
        self.tokens = list(request.prompt)
        self.stream = random.Random(request.seed)

    @property
    def num_new(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.request.prompt) :]
