"""Triton's interpreter, made faster for tests."""

import triton.language as tl
from triton.runtime import interpreter


def patch_the_language_once() -> None:
    """Let a function that a kernel calls find the language as the kernel's launch has patched it.

    By itself the interpreter patches it again in each call, which takes longer than the function.
    """
    interpreter._patch_lang(tl.sum.fn)  # what Triton's own functions call

    def call(function, *args, **keywords):
        return function.rewrite()(*args, **keywords)

    interpreter.InterpretedFunction.__call__ = call
