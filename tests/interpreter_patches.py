"""Replace Triton's language for interpreted kernels once a launch, instead of at every call of a function.

The interpreter puts its own functions in place of those of ``triton.language`` when a launch begins, and
again for each call of one jit function by another, where they already are: two fifths of the time of small
kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def install() -> None:
    """Let calls within a launch leave the language as the launch has made it."""
    replace: Callable[..., Any] = interpreter._patch_lang

    def replace_once(fn: Any) -> Any:
        if all(map(is_replaced, languages_of(fn))):
            return interpreter._LangPatchScope()
        return replace(fn)

    interpreter._patch_lang = replace_once


def languages_of(fn: Any) -> list[Any]:
    """The modules that the interpreter patches for a function: those in the globals of its module."""
    modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return [module for module in modules if module is tl or module is tl.core] or [tl]


def is_replaced(language: Any) -> bool:
    """Whether a module has the interpreter's functions now."""
    return language.range.__module__ == interpreter.__name__
