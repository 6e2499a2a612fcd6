"""Chat templates that end: limits on the loops, calls, texts and seconds of a Jinja template.

transformers renders chat templates in Jinja's sandbox, which keeps them from running code but not
from running for ever.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_STEPS = 2_000_000
"""Items of loops and calls in one rendering; a conversation of 1000 messages takes some 10,000."""

MOST_CHARS = 1 << 24
"""Characters of a text that a template makes, and items of a list."""

_MOST_CPU_SECONDS = 60.0  # for filters that take long without a step; the same on a loaded machine
_MOST_BITS = 1 << 16  # of a power
_COUNTED, _MEASURED = "counted for the limit of steps", "measured for the limit of characters"


@dataclass
class _Budget:
    """Remaining limits of one rendering."""

    steps: int = field(default_factory=lambda: MOST_STEPS)
    ends_at: float = field(default_factory=lambda: time.thread_time() + _MOST_CPU_SECONDS)

    def take(self) -> None:
        """Count a step.

        Raises:
            SecurityError: it is one too many, or too late.
        """
        self.steps -= 1
        if self.steps < 0:
            raise SecurityError(f"it takes more than {MOST_STEPS} steps of loops and calls")
        if time.thread_time() > self.ends_at:
            raise SecurityError(f"it takes more than {_MOST_CPU_SECONDS:.0f} CPU seconds")


_budget: ContextVar[_Budget | None] = ContextVar("budget of a chat template", default=None)


@contextmanager
def limits() -> Iterator[None]:
    """Limit what templates of `BoundedEnvironment` do in here, all together."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def require_short(text: str) -> None:
    """Raise SecurityError if a text is longer than a template may make it."""
    if len(text) > MOST_CHARS:
        raise SecurityError(f"it writes a text of more than {MOST_CHARS} characters")


def _take_step() -> None:
    budget = _budget.get()
    if budget is not None:
        budget.take()


class _Counted:
    """The items of a loop, each of which is a step."""

    def __init__(self, items: Iterable[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _take_step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError is what Jinja looks for


def _measured(text: Any) -> Any:
    require_short(text)
    return text


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on loops, calls and the size of texts.

    Operators that could make a large value are computed while rendering and not while compiling.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.filters[_COUNTED] = _Counted
        self.filters[_MEASURED] = _measured

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Return the tree of a template whose loops are counted and concatenations measured."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(cast(nodes.Expr, loop.iter), _COUNTED)
        _measure_concatenations(tree)
        return tree

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Return the result of an operator, unless it would be large."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    _require_few(len(one) * max(other, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and hasattr(right, "__len__"):
            _require_few(len(left) + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_few_bits(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template: a step."""
        _take_step()
        if isinstance(getattr(obj, "__self__", None), str):  # widths, such as of ljust
            _require_few(max((arg for arg in args if isinstance(arg, int)), default=0))
        return super().call(context, obj, *args, **kwargs)


def _require_few(number: int) -> None:
    if number > MOST_CHARS:
        raise SecurityError(f"it makes a value of {number} characters or items, over {MOST_CHARS}")


def _require_few_bits(number: int) -> None:
    if number > _MOST_BITS:
        raise SecurityError(f"it makes a number of more than {_MOST_BITS} bits")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _measure_concatenations(tree: nodes.Node) -> None:
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _filtered(value, _MEASURED))
            elif isinstance(value, list):
                wrapped = [
                    _filtered(each, _MEASURED) if isinstance(each, nodes.Concat) else each
                    for each in value
                ]
                setattr(parent, name, wrapped)
