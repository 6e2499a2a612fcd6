"""Chat templates that end: limits on the loops, calls, texts and seconds of a Jinja template.

transformers renders chat templates in Jinja's sandbox, which keeps them from running code but not
from running for ever.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
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
_MOST_WIDTH = 1 << 16
_MOST_TOTAL = 1 << 31  # characters, and 8 for an item, of all values of one rendering
_WIDTH = re.compile(r"\d{6,}|%[-+ #0.\d]*\*")
"""A width in a format that makes a large text, or one that is an argument."""

_SIZING = ("batch", "center", "indent", "round", "slice", "tojson", "wordwrap")
"""Filters whose result grows with a number that they are given."""
_COUNTED, _MEASURED = "counted for the limit of steps", "measured for the limit of characters"


@dataclass
class _Budget:
    """Remaining limits of one rendering."""

    steps: int = field(default_factory=lambda: MOST_STEPS)
    chars: int = field(default_factory=lambda: _MOST_TOTAL)
    ends_at: float = field(default_factory=lambda: time.thread_time() + _MOST_CPU_SECONDS)

    def take_value(self, value: Any) -> None:
        """Count the memory of a value.

        Raises:
            SecurityError: all values together are too large.
        """
        if isinstance(value, str | list | tuple):
            self.chars -= len(value) * (1 if isinstance(value, str) else 8)
            if self.chars < 0:
                raise SecurityError(f"its values have more than {_MOST_TOTAL} characters together")

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
    """Limit the work of all templates of `BoundedEnvironment` in this context together."""
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
        return len(self._items)  # type: ignore[arg-type]  # Jinja expects a TypeError


def _require_small(value: Any) -> Any:
    """Return a value, unless it or all values together are too large."""
    if isinstance(value, str):
        require_short(value)
    elif isinstance(value, list | tuple):
        _require_few(len(value))
    budget = _budget.get()
    if budget is not None:
        budget.take_value(value)
    return value


def _join(parts: Iterable[str]) -> str:
    """Join the output of a template, as long as it is short."""
    written: list[str] = []
    length = 0
    for part in parts:
        written.append(part)
        length += len(part)
        if length > MOST_CHARS:
            raise SecurityError(f"it writes a text of more than {MOST_CHARS} characters")
    return cast(str, _require_small("".join(written)))


class _BoundedFilters(dict[str, Any]):
    """Filters that refuse to make large values, those that are added later too."""

    def __getitem__(self, name: str) -> Any:
        return _limit_calls(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a filter by its name."""
        return _limit_calls(name, super().__getitem__(name)) if name in self else default


def _limit_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after Jinja's context

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = _with_lengths(args)
        given = (*args[first + 1 :], *kwargs.values())
        _require_small_result(name, args[first] if len(args) > first else None, given)
        return _require_small(function(*args, **kwargs))

    return bounded


def _with_lengths(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([*_Counted(arg)] if isinstance(arg, Iterator) else arg for arg in args)


def _require_small_result(name: str, value: Any, given: tuple[Any, ...]) -> None:
    """Refuse a filter or method of `value` whose result would be large, before it is made."""
    numbers = [abs(each) for each in given if isinstance(each, int)]
    texts = [each for each in given if isinstance(each, str)]
    if name in _SIZING and max(numbers, default=0) > _MOST_WIDTH:
        raise SecurityError(f"{name} is given a number over {_MOST_WIDTH}")
    if name in ("indent", "wordwrap", "expandtabs") and isinstance(value, str):
        lines = len(value) if name == "wordwrap" else value.count("\n") + value.count("\t") + 1
        _require_few(lines * max([*map(len, texts)] if name == "wordwrap" else numbers, default=0))
    elif name == "replace" and isinstance(value, str) and len(texts) >= 2:
        _require_few(value.count(texts[0]) * len(texts[1]))
    elif name == "join":
        sizes = [len(each) for each in (value, *given) if hasattr(each, "__len__")]
        if len(sizes) > 1:
            _require_few(sizes[0] * sizes[1])
    elif name == "format" and isinstance(value, str) and _WIDTH.search(value):
        raise SecurityError(
            "a format has a width of more than 5 digits, or one that is an argument"
        )


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on loops, calls and the size of texts.

    Operators that could make a large value are computed while rendering and not while compiling.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    concat = staticmethod(_join)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.globals.pop("lipsum", None)  # which writes any number of paragraphs
        self.filters = _BoundedFilters(self.filters)
        self.filters[_COUNTED] = _Counted
        self.filters[_MEASURED] = _require_small

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Return the tree of a template whose loops are counted and concatenations measured."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter_node(cast(nodes.Expr, loop.iter), _COUNTED)
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
        elif operator == "%" and isinstance(left, str):
            _require_small_result("format", left, ())
        return _require_small(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template: a step."""
        _take_step()
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):  # widths, such as of ljust
            args = _with_lengths(args)
            given = (*args, *kwargs.values())
            _require_few(max((arg for arg in given if isinstance(arg, int)), default=0))
            name = method.__name__.removesuffix("_map")
            _require_small_result(name, owner, given)
        return _require_small(super().call(context, obj, *args, **kwargs))


def _require_few(number: int) -> None:
    if number > MOST_CHARS:
        raise SecurityError(f"it makes a value of {number} characters or items, over {MOST_CHARS}")


def _require_few_bits(number: int) -> None:
    if number > _MOST_BITS:
        raise SecurityError(f"it makes a number of more than {_MOST_BITS} bits")


def _filter_node(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _measure_concatenations(tree: nodes.Node) -> None:
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _filter_node(value, _MEASURED))
            elif isinstance(value, list):
                wrapped = [
                    _filter_node(each, _MEASURED) if isinstance(each, nodes.Concat) else each
                    for each in value
                ]
                setattr(parent, name, wrapped)
