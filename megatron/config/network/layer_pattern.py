"""Which layers are meant by a number or by an expression of lists, as Megatron-LM writes them."""

import ast
from typing import Any

_LONGEST = 10_000


def pattern_of(said: str) -> Any:
    """Return the number or the list that `said` spells; None when it is neither.

    >>> pattern_of("[1]*3+[0]")
    [1, 1, 1, 0]
    """
    try:
        return _evaluated(ast.parse(said.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None


def is_of_layers(pattern: Any, num_layers: int) -> bool:
    """Return whether `pattern` is a list that says 0 or 1 of each layer."""
    return (
        isinstance(pattern, list)
        and len(pattern) == num_layers
        and all(place in (0, 1) for place in pattern)
    )


def _evaluated(node: ast.AST) -> Any:
    """Return what an expression of lists, sums and repetitions of them says."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_evaluated(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, times = _evaluated(left), _evaluated(right)
            are_both = isinstance(repeated, list) and isinstance(times, int)
            if are_both and len(repeated) * times <= _LONGEST:
                return repeated * times
    raise ValueError("no list")
