"""The parts of `make gpu`: their order, commands and time limits, and the question that each one answers.

The most valuable results come first, in case the machine is lost before the end. Each part has to end at a
fixed time after the start, so the next part gets the time that a part does not use.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template

from tritoncp.perf.records.history import OURS, variant

BUDGET = 540.0  # seconds for the whole run
START = 10.0  # seconds of the budget to import torch, find the GPU, and write the summary
GRACE = 5.0  # seconds of a part between SIGINT and SIGKILL
BATCH = 10  # tests per pytest process

PERF = "$python -m tritoncp.perf.run --out $out"
PYTEST = "$python -m pytest -o addopts= --import-mode=importlib -v -ra --durations=10"


@dataclass(frozen=True)
class Step:
    """Commands in shell syntax, of which up to ``--jobs`` run at a time. Placeholders: $python, $out, $jobs,
    $seconds (time for this step) and $arguments (for pytest).

    share:    fraction of the part's remaining time that the step may take
    optional: whether the part can succeed though this step fails
    output:   file in the results folder for stdout; by default stdout goes to the part's log
    environment: variables besides those of every part
    batch:    a command that runs the tests whose names ``commands`` print, BATCH at a time, in order of TESTS
    """

    commands: tuple[str, ...]
    share: float = 1.0
    optional: bool = False
    output: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    batch: str = ""

    def words(self, values: Mapping[str, str]) -> list[list[str]]:
        """Each command as a list of words."""
        return [fill(command, values) for command in self.commands]


@dataclass(frozen=True)
class Part:
    """A part of the run.

    seconds: its time limit, if the parts before it use all of theirs
    answers: the question that it answers
    needs:   a program on PATH without which the part does not run
    """

    name: str
    seconds: float
    answers: str
    steps: tuple[Step, ...]
    needs: str = ""


def fill(command: str, values: Mapping[str, str]) -> list[str]:
    """Split a command into words and fill in its placeholders; $arguments becomes any number of words.

    >>> fill("$python -m pytest $arguments", {"python": "/a b/python", "arguments": "-k 'x y'"})
    ['/a b/python', '-m', 'pytest', '-k', 'x y']
    """
    filled = []
    for word in shlex.split(command):
        filled += (
            shlex.split(values["arguments"]) if word == "$arguments" else [Template(word).substitute(values)]
        )
    return filled


def _options(name: str, values: Sequence[str]) -> str:
    return " ".join(f"{name} {shlex.quote(value)}" for value in values)


def _as_json(options_list: Sequence[Mapping[str, object]]) -> list[str]:
    return [json.dumps(options) for options in options_list]


# -- the forward routes, the fused backward pass, ring steps -------------------------------------------------

ROUTES = ({"ROUTE": "loops"}, {"ROUTE": "gluon"}, {"ROUTE": "specialised"}, {"FUSED_BACKWARD": True})
LONG = tuple(f"{mask}-16k-*" for mask in ("causal", "full", "document", "window"))
NARROW, RING = "causal-h64x8-d64x64-16k-*", "causal-s2-ring-16k-*"
SHORT = tuple(f"{mask}-8k-*" for mask in ("causal", "full", "document", "window"))
EIGHT_RANKS = "causal-s8-ring-32k-fwd"
TRIED = _options("--try", _as_json(ROUTES))
_NAMES = (OURS, *(variant(options) for options in ROUTES[1:]))

# Each contender of each problem first runs in a process of its own, so that kernels compile in parallel;
# timing then has the GPU to itself. Other lengths and ROUTE=loops launch kernels that this compiles too.
WARM = Step(
    tuple(
        f"{PERF} --warm --tier full --budget $seconds {TRIED} --only '{case}' --contenders '{name}'"
        for case, name in itertools.product((*LONG, NARROW, RING), _NAMES)
    ),
    share=0.45,
    optional=True,
)
RACE = Step((
    f"{PERF} --tier full --seconds 0.4 --budget $seconds {TRIED} "
    + _options("--only", (*LONG, NARROW, RING, *SHORT, EIGHT_RANKS)) + " "
    + _options("--contenders", ("tritoncp*", "flash", "cudnn", "whole")),
))  # fmt: skip

# -- tiles, compiled flex attention --------------------------------------------------------------------------

TILES = ({"fwd_BLOCK_N": 64, "fwd_maxnreg": 128}, {"fwd_BLOCK_M": 64, "fwd_num_warps": 4})
TILE_TRIALS = Step((
    f"{PERF} --seconds 0.4 --budget $seconds --contenders 'tritoncp*' "
    + _options("--only", ("causal-16k-fwd", "full-16k-fwd")) + " "
    + _options("--try", _as_json(TILES)),
))  # fmt: skip
AUTOTUNE = Step((
    "$python -m tritoncp autotune --worst $out --out $out/configs --jobs $jobs --budget ${seconds}s",
))  # fmt: skip
FLEX = _options("--contenders", ("flex", "flex flash", "flex max-autotune", "flash", "cudnn"))
# perf.run starts the tuned variant only if as much time is left as the other variants took; with this budget
# it always starts: an interrupted variant loses only its own line, and without it there is no ratio.

# -- tests ---------------------------------------------------------------------------------------------------

SMOKE = "tests/gpu/test_smoke.py"
OVERLAP = "tests/gpu/test_overlap.py"  # compares times, so it needs the GPU for itself
# The order of the files tests/gpu/test_<name>.py. Unlisted files run after TESTS and before LAST, whose
# kernels may hang.
TESTS = ("answers", "steps", "worlds", "few_rows", "varlen", "descriptors")
LAST = ("specialised", "gluon")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # since many processes run at a time


def batches(names: Sequence[str]) -> list[list[str]]:
    """Sort tests by importance into batches of ten; tests that may hang come last, in separate batches.

    >>> batches(["tests/gpu/test_gluon.py::a", "tests/gpu/test_x.py::b", "tests/gpu/test_answers.py::c"])
    [['tests/gpu/test_answers.py::c', 'tests/gpu/test_x.py::b'], ['tests/gpu/test_gluon.py::a']]
    """

    def place(name: str) -> int:
        stem = name.partition("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        if stem in LAST:
            return len(TESTS) + 1 + LAST.index(stem)
        return TESTS.index(stem) if stem in TESTS else len(TESTS)

    grouped = itertools.groupby(sorted(names, key=place), key=lambda name: max(place(name), len(TESTS)))
    groups = [list(group) for _, group in grouped]
    return [group[i : i + BATCH] for group in groups for i in range(0, len(group), BATCH)]


# -- the table -----------------------------------------------------------------------------------------------

PARTS = (
    Part(
        "check",
        60,
        "is every schedule right on this machine, in which dtypes, with which compiler",
        (Step(("$python -m tritoncp check --json --budget $seconds",), output="check.json"),),
    ),
    Part(
        "routes",
        95,
        "which forward route is fastest; is the fused backward right; what do ring steps and 8 ranks cost",
        (WARM, RACE),
    ),
    Part("tiles", 30, "do narrower or lower forward tiles win", (TILE_TRIALS,)),
    Part(
        "flex",
        110,
        "how much faster than PyTorch's flex attention, tuned",
        tuple(
            Step((f"{PERF} --seconds 0.4 --budget 600 --only '{mask}-16k-*' {FLEX}",), share)
            for mask, share in (("causal", 0.55), ("document", 1.0))
        ),
    ),
    Part(
        "tests",
        125,
        "which features of the package work on this GPU",
        (
            Step((f"{PYTEST} {SMOKE}",), share=0.5, environment=ONE_THREAD),
            Step((f"{PYTEST} -s {OVERLAP}",), share=0.3, environment=ONE_THREAD),
            Step(
                (f"{PYTEST} --collect-only -qq --ignore={SMOKE} --ignore={OVERLAP} tests/gpu $arguments",),
                environment=ONE_THREAD,
                batch=PYTEST,
            ),
        ),
    ),
    Part(
        "autotune",
        75,
        "which tiles and route are best for the case that lost most",
        (AUTOTUNE,),
    ),
    Part(
        "sanitizer",
        25,
        "does any kernel of the smoke tests read or write out of bounds",
        (
            Step(
                (f"compute-sanitizer --tool memcheck --error-exitcode 1 {PYTEST} {SMOKE}",),
                environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # a memory pool would hide out-of-bounds
            ),
        ),
        needs="compute-sanitizer",
    ),
)


def timetable(parts: Sequence[Part], budget: float) -> Iterator[tuple[Part, float, float]]:
    """Yield each part with the seconds after the start by which it begins and has to end.

    >>> [(part.name, begin, end) for part, begin, end in timetable(PARTS[:2], BUDGET)]
    [('check', 10.0, 70.0), ('routes', 70.0, 165.0)]
    """
    scale, begin = budget / BUDGET, START
    for part in parts:
        yield part, begin * scale, (begin + part.seconds) * scale
        begin += part.seconds
