"""Scores of tiles through torch.compile, where the user asks for it and a C++ compiler exists."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tritoncp.core.environment import CPU_COMPILE

MAX_GRAPHS = 64  # compilations of one function, each for other score_mods; torch's limit is 8


def compiles_scores(option: bool | None) -> bool:
    """Return whether a call compiles: as its option COMPILE says, else as the environment variable says."""
    is_requested = CPU_COMPILE.read() if option is None else option
    return is_requested and _has_compiler()


@cache
def _has_compiler() -> bool:
    """Return whether torch.compile has a C++ compiler; warn once if it has none."""
    from torch._inductor import cpp_builder, exc  # takes a second to import

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        warnings.warn(
            "COMPILE is requested, and torch.compile has no C++ compiler here: the CPU engine runs "
            "uncompiled. Install g++ or clang++, or name one in the environment variable CXX",
            stacklevel=2,
        )
        return False
    return True


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, for tensors of any size. Numbers (the scale, what a score_mod captures) are
    constants: torch's operations refuse symbols in their place under vmap."""
    inner = torch.compile(function, dynamic=True)

    def call(*args: Any) -> Any:
        limits: dict[str, Any] = {
            "recompile_limit": MAX_GRAPHS,
            "specialize_float": True,
            "specialize_int": True,
        }
        with torch._dynamo.config.patch(limits):
            return inner(*args)

    return call
