"""Environment variables of tritoncp: names, accepted values and defaults (effects: docs/commands.md); and how
Triton kernels run on CPU tensors, which TRITON_INTERPRET decides.

Imports neither torch nor Triton.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PREFIX = "TRITONCP_"
ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
TUNING_SECONDS = 60.0  # seconds of tuning with TRITONCP_AUTOTUNE=1


def parse_switch(text: str) -> bool:
    """Parse a value of a switch. Raises ValueError for other text.

    >>> parse_switch("1"), parse_switch("off")
    (True, False)
    """
    word = text.strip().lower()
    if word not in (*ON, *OFF):
        raise ValueError(f"{text!r} is not a switch; pass 0 or 1")
    return word in ON


def parse_seconds(text: str, zero: bool = False) -> float:
    """Parse a time with unit s, m or h. Raises ValueError for other text. zero: whether 0 is accepted

    >>> parse_seconds("15m"), parse_seconds("90s"), parse_seconds("1.5h"), parse_seconds("20")
    (900.0, 90.0, 5400.0, 20.0)
    """
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf or (zero and seconds == 0)):
        raise ValueError(f"{text!r} is not a positive time; pass for example 90s, 15m or 1.5h")
    return seconds


def parse_budget(text: str) -> float:
    """Parse TRITONCP_AUTOTUNE to seconds for tuning: a switch, where 1 is a minute, or a time.

    >>> parse_budget("0"), parse_budget("1"), parse_budget("5m")
    (0.0, 60.0, 300.0)
    """
    try:
        return TUNING_SECONDS if parse_switch(text) else 0.0
    except ValueError:
        return parse_seconds(text)


@dataclass(frozen=True)
class Variable:
    """An environment variable of tritoncp.

    parse:   function from text to value; raises ValueError for text that is not accepted
    values:  description of the accepted texts
    default: the value if the variable is empty or not set
    """

    name: str
    parse: Callable[[str], Any] = parse_switch
    values: str = "0 or 1 (also off/on, no/yes, false/true)"
    default: Any = False

    def read(self) -> Any:
        """Return the value of the variable; for text that is not accepted, warn and return the default."""
        text = os.environ.get(self.name, "")
        try:
            return self.parse(text) if text else self.default
        except ValueError:
            warnings.warn(f"{self.describe_fault(text)} The default is used", stacklevel=2)
            return self.default

    def describe_fault(self, text: str) -> str:
        return f"{self.name}={text!r} is not understood; accepted: {self.values}."


AUTOTUNE = Variable("TRITONCP_AUTOTUNE", parse_budget, "0, 1 (a minute) or a time as 90s, 5m, 1h", 0.0)
CHECK = Variable("TRITONCP_CHECK")
CONFIG_DIR = Variable("TRITONCP_CONFIG_DIR", str, "a folder, or - for none", None)
DEBUG = Variable("TRITONCP_DEBUG")
OFFLINE_LOG = Variable("TRITONCP_OFFLINE_LOG")
UNSAFE_FUSED = Variable("TRITONCP_UNSAFE_FUSED")
VARIABLES = {one.name: one for one in (AUTOTUNE, CHECK, CONFIG_DIR, DEBUG, OFFLINE_LOG, UNSAFE_FUSED)}
# Variables of other packages, besides all variables of Triton, torch and NCCL.
OF_OTHERS = ("GLOO_SOCKET_IFNAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def set_variables() -> dict[str, str]:
    """Return the set variables that affect this package: variables of tritoncp, Triton, torch and NCCL, and
    OF_OTHERS."""
    prefixes = "TRITON", "TORCH", "NCCL"
    return {k: v for k, v in sorted(os.environ.items()) if k in OF_OTHERS or k.startswith(prefixes)}


def faults() -> Iterator[str]:
    """Yield a line for each variable of the package with an invalid value or an unknown name."""
    for name, text in sorted(os.environ.items()):
        variable = VARIABLES.get(name)
        if variable is not None:
            try:
                _ = text and variable.parse(text)
            except ValueError:
                yield variable.describe_fault(text)
        elif name.startswith(PREFIX):
            yield f"{name} is set, but is unknown; the variables are {', '.join(VARIABLES)}"


# -- Triton kernels on CPU tensors: executed as compiled for a GPU, or interpreted --------------------------


_executed: list[str] = []  # architectures of active executors, the innermost last


def cpu_target() -> str | None:
    """Return how Triton kernels run on CPU tensors: compiled for an architecture and executed ("sm_90"),
    "interpreter" with TRITON_INTERPRET=1, or None: not at all."""
    return executed_target() or ("interpreter" if os.environ.get("TRITON_INTERPRET", "0") == "1" else None)


def executed_target() -> str | None:
    """Return the architecture for which kernels are compiled and executed on the CPU; None: they are not."""
    return _executed[-1] if _executed else None


@contextmanager
def execute_for(architecture: str) -> Iterator[None]:
    """Execute kernels compiled for an architecture in calls on CPU tensors, in a ``with`` block."""
    _executed.append(architecture)
    try:
        yield
    finally:
        _executed.pop()
