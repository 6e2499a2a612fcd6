"""Layer patterns: a number or an expression of lists, as Megatron-LM writes them."""

import ast
from typing import Any

_LONGEST = 10_000


def pattern_of(text: str) -> Any:
    """Parse a layer pattern: the number or the list in `text`; None when it is neither.

    >>> pattern_of("[1]*3+[0]")
    [1, 1, 1, 0]
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None


def is_of_layers(pattern: Any, num_layers: int) -> bool:
    """Whether `pattern` is a list with a 0 or 1 for each layer."""
    return (
        isinstance(pattern, list)
        and len(pattern) == num_layers
        and all(each in (0, 1) for each in pattern)
    )


def _evaluate(node: ast.AST) -> Any:
    """Evaluate an expression of lists, their sums and repetitions."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_evaluate(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, times = _evaluate(left), _evaluate(right)
            are_both = isinstance(repeated, list) and isinstance(times, int)
            if are_both and len(repeated) * times <= _LONGEST:
                return repeated * times
    raise ValueError("no list")
