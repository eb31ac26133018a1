"""Registry of environment variables: those of tritoncp, with their values, and those of other packages that
it reads. Every read of a TRITONCP_ variable goes through :meth:`Variable.read`.

``python -m tritoncp.core.environment --write`` writes docs/environment.md from this registry. Loads neither
torch nor Triton.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "TRITONCP_"
PAGE = Path(__file__).parents[2] / "docs/environment.md"
ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
TUNING_SECONDS = 60.0  # that TRITONCP_AUTOTUNE=1 allows


@dataclass(frozen=True)
class Variable:
    """An environment variable of tritoncp.

    parse:   turns its text into a value; raises ValueError for text that is not accepted
    values:  the accepted texts, in words
    default: the value of a variable that is not set or empty; ``default_text`` describes it
    effect:  what it does
    moment:  when it is read
    """

    name: str
    parse: Callable[[str], Any]
    values: str
    default: Any
    default_text: str
    effect: str
    moment: str

    def read(self) -> Any:
        """Return the value of the variable. Text that is not accepted causes a warning and counts as not
        set."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            warnings.warn(f"{self.complaint(text)} The default is used", stacklevel=2)
            return self.default

    def complaint(self, text: str) -> str:
        """Return the sentence that says which values the variable accepts in place of ``text``."""
        return f"{self.name}={text!r} is not understood; accepted: {self.values.replace('`', '')}."

    def fault(self) -> str | None:
        """Return what is wrong with the value that is set; None if nothing is."""
        text = os.environ.get(self.name, "")
        try:
            _ = text and self.parse(text)
        except ValueError:
            return self.complaint(text)
        return None


def parse_switch(text: str) -> bool:
    """Parse a value of a switch. Raises ValueError for other text.

    >>> parse_switch("1"), parse_switch("off")
    (True, False)
    """
    word = text.strip().lower()
    if word not in (*ON, *OFF):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return word in ON


def parse_seconds(text: str) -> float:
    """Parse a time with unit s, m or h. Raises ValueError for other text.

    >>> parse_seconds("15m"), parse_seconds("90s"), parse_seconds("1.5h"), parse_seconds("20")
    (900.0, 90.0, 5400.0, 20.0)
    """
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise ValueError(f"budget {text!r} is no time: 90s, 15m, 1.5h") from error
    if not 0 < number < math.inf:
        raise ValueError(f"budget {text!r} is no time to work in")
    return number


def parse_budget(text: str) -> float:
    """Parse the seconds for tuning: a switch, where 1 means a minute, or a time.

    >>> parse_budget("0"), parse_budget("1"), parse_budget("5m")
    (0.0, 60.0, 300.0)
    """
    if text.strip().lower() in (*ON, *OFF):
        return TUNING_SECONDS if parse_switch(text) else 0.0
    return parse_seconds(text)


def _switch(name: str, effect: str, moment: str) -> Variable:
    return Variable(
        name, parse_switch, "`0` or `1` (also off/on, no/yes, false/true)", False, "`0`", effect, moment
    )


AUTOTUNE = Variable(
    "TRITONCP_AUTOTUNE", parse_budget, "`0`, `1` (a minute) or a time as `90s`, `5m`, `1h`", 0.0, "`0`",
    "Measures tile shapes at the first call of a kind that has no measured ones, for at most this long. "
    "Under several ranks rank 0's value counts.",
    "when a plan is made, and when a call of a new kind prepares its kernels",
)  # fmt: skip
CACHE_DIR = Variable(
    "TRITONCP_CACHE_DIR", str, "a folder", None, "`tritoncp` in the user's cache folder",
    "Keeps the Triton source that mask_mods and score_mods are translated to, in `mods/` of this folder.",
    "when a mod is translated",
)  # fmt: skip
CHECK = _switch(
    "TRITONCP_CHECK",
    "Compares every call between the ranks, also numbers that a score_mod captures: for the search of a "
    "mismatch or a hang. Costs a message a call.",
    "when `tritoncp.distributed` is imported, on every rank",
)
CONFIG_DIR = Variable(
    "TRITONCP_CONFIG_DIR", str, "a folder, or `-` for none", None,
    "`tritoncp/configs` in the user's configuration folder",
    "Folder of measured tile shapes, written by `tritoncp autotune` and searched before the user's folder "
    "and the package's. With `-` no measured tiles are used, and nothing is tuned.",
    "when a call of a new kind prepares its kernels",
)  # fmt: skip
CPU_COMPILE = _switch(
    "TRITONCP_CPU_COMPILE",
    "Runs score_mods on the CPU engine through torch.compile, where the kernel option COMPILE is not passed.",
    "at every call on the CPU engine",
)
DEBUG = _switch(
    "TRITONCP_DEBUG",
    "Shows the traceback of an error of a `tritoncp` command, in place of a message.",
    "when a command fails",
)
OFFLINE_LOG = _switch(
    "TRITONCP_OFFLINE_LOG",
    "Shows what the compiler prints while kernels are compiled for absent GPUs (`tritoncp inspect`, "
    "`tritoncp autotune`).",
    "when a process of the compiler starts",
)
UNSAFE_FUSED = _switch(
    "TRITONCP_UNSAFE_FUSED",
    "Runs the fused backward kernel (kernel option FUSED_BACKWARD) also where this Triton is known to "
    "compile it wrong: gradients may be wrong.",
    "when the options of a call are checked",
)
VARIABLES: Mapping[str, Variable] = {
    one.name: one
    for one in (AUTOTUNE, CACHE_DIR, CHECK, CONFIG_DIR, CPU_COMPILE, DEBUG, OFFLINE_LOG, UNSAFE_FUSED)
}

# Variables of other packages that this package reads or sets: (owner, what they mean here).
OF_OTHERS: Mapping[str, tuple[str, str]] = {
    "TRITON_INTERPRET": (
        "Triton",
        "`1`: tensors on the CPU run on the Triton kernels, interpreted (exact, slow). To be set before "
        "Python starts; `tritoncp check` and `tritoncp perf` set it where there is no GPU",
    ),
    "TRITON_PTXAS_PATH": ("Triton", "another ptxas for GPUs before Blackwell; `tritoncp doctor` checks it"),
    "TRITON_PTXAS_BLACKWELL_PATH": ("Triton", "another ptxas for Blackwell; `tritoncp doctor` checks it"),
    "TORCH_LOGS": ("torch", "`+tritoncp` shows every log line, `tritoncp` those of new decisions"),
    "TORCH_NCCL_HIGH_PRIORITY": (
        "torch",
        "`1`: groups have streams of high priority, and need no communicator beside their own",
    ),
    "NCCL_LAUNCH_ORDER_IMPLICIT": ("NCCL", "`1`: communicators in flight at once do not deadlock"),
    "GLOO_SOCKET_IFNAME": (
        "gloo",
        "network interface; where all ranks are on one machine, the demo and `tritoncp check` set the "
        "loopback interface unless it is set",
    ),
    "RANK": ("torchrun", "rank of this process"),
    "LOCAL_RANK": ("torchrun", "rank of this process on its host: the number of its GPU"),
    "WORLD_SIZE": ("torchrun", "number of ranks"),
    "LOCAL_WORLD_SIZE": ("torchrun", "number of ranks on this host"),
    "TORCHELASTIC_RUN_ID": ("torchrun", "set: torchrun started this process"),
    "CXX": ("torch", "C++ compiler of torch.compile, for TRITONCP_CPU_COMPILE"),
    "PYTHONPATH": ("Python", "extended for processes that the package starts"),
}


def set_variables() -> dict[str, str]:
    """Return the variables that are set and concern the package: those of this page, and all of Triton, torch
    and NCCL; PYTHONPATH is left out."""
    prefixes = "TRITON", "TORCH", "NCCL"
    names = {*VARIABLES, *OF_OTHERS} - {"PYTHONPATH"}
    return {k: v for k, v in sorted(os.environ.items()) if k in names or k.startswith(prefixes)}


def faults() -> Iterator[str]:
    """Yield a line for each variable that is set to a value that is not accepted, or that nothing reads."""
    for variable in VARIABLES.values():
        if fault := variable.fault():
            yield fault
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            yield f"{name} is set, and nothing reads it; the variables are {', '.join(VARIABLES)}"


def page() -> str:
    """Return the text of docs/environment.md."""
    own = [
        (f"`{one.name}`", one.values, one.default_text, one.effect, f"Read {one.moment}.")
        for one in VARIABLES.values()
    ]
    others = [(f"`{name}`", owner, meaning) for name, (owner, meaning) in OF_OTHERS.items()]
    return "\n".join(
        [
            "# Environment variables",
            "",
            "Written by `python -m tritoncp.core.environment --write` from the registry in",
            "`tritoncp/core/environment.py`; do not edit it by hand. `tritoncp doctor` lists the variables",
            "that are set, and those with a value that is not accepted.",
            "",
            "## Of tritoncp",
            "",
            "A variable that is empty counts as not set. A value that is not accepted causes a warning with",
            "the accepted ones, and the default is used.",
            "",
            *_table(("variable", "values", "default", "effect", "when it is read"), own),
            "",
            "## Of others",
            "",
            "Variables that tritoncp reads or sets, and that belong to other packages.",
            "",
            *_table(("variable", "of", "meaning here"), others),
            "",
        ]
    )


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(re.sub(r'[|]', '/', cell) for cell in row)} |"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    elif sys.argv[1:]:
        sys.exit("usage: python -m tritoncp.core.environment [--write]")
    else:
        sys.stdout.write(page())
