"""Windows and positions by layer: layer patterns (numbers, expressions of lists) as Megatron-LM writes them."""

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


def window_of(text: str | None) -> int:
    """Return the attention window in tokens, the token itself included; 0 for no limit.

    Takes Megatron's pair "(LEFT, RIGHT)", with or without parentheses, and LEFT alone: how many
    on each side of the token, -1 for all.

    Raises:
        ValueError: it is none of that, or RIGHT lets a token see what it has to predict.
    """
    if text is None:
        return 0
    left, comma, right = text.strip().removeprefix("(").removesuffix(")").partition(",")
    if int(left) < -1 or (comma and int(right) != 0):
        raise ValueError(text)
    return int(left) + 1


def windowless_layers(freq: str, num_layers: int) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the layers without a window by --window-attn-skip-freq.

    Raises:
        ValueError: `freq` does not fit the layers.
    """
    pattern = pattern_of(freq)
    if isinstance(pattern, int) and pattern > 0:
        return tuple(range(pattern, num_layers + 1, pattern))
    if not is_of_layers(pattern, num_layers):
        raise ValueError(
            f"--window-attn-skip-freq {freq} is neither a number of at least 1 nor a list of "
            f"{num_layers} times 1 (a layer with the window) or 0, such as [1]*3+[0]"
        )
    return tuple(number for number, windowed in enumerate(pattern, 1) if not windowed)


def unrotated_layers(freq: str | None, num_layers: int) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the layers without rotary positions by --no-rope-freq.

    Raises:
        ValueError: `freq` does not fit the layers.
    """
    pattern = pattern_of(freq or "[]")
    if isinstance(pattern, int) and pattern > 0:
        return tuple(range(pattern, num_layers + 1, pattern))
    if freq is not None and not is_of_layers(pattern, num_layers):
        raise ValueError(
            f"--no-rope-freq {freq} is neither a number of at least 1 nor a list of {num_layers} "
            "times 1 (a layer without rotary positions) or 0, such as [0]*3+[1]"
        )
    return tuple(number for number, is_unrotated in enumerate(pattern, 1) if is_unrotated)


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
