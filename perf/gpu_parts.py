"""The table of `make gpu`: in which order the parts run, what each answers, how long it may take.

The most valuable facts come first, so that a machine that is taken away early has given those. Each part has
to end at a fixed time after the start; time that it leaves is added to the parts after it.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template

from tritoncp.perf.record import OURS, variant

BUDGET = 540.0  # seconds for everything
START = 10.0  # of them: to import torch, find the GPU, and write the summary
GRACE = 5.0  # of a part's seconds: between SIGINT and SIGKILL
BATCH = 10  # tests that one pytest runs

PERF = "$python -m tritoncp.perf.run --out $out"
PYTEST = "$python -m pytest -o addopts= --import-mode=importlib -v -ra --durations=10"


@dataclass(frozen=True)
class Step:
    """Commands of which up to ``--jobs`` run at a time; words are those of a shell, with $python, $out,
    $jobs, $seconds (left to this step) and $arguments (of pytest).

    share:    of the time that is left to the part when the step begins
    optional: whether a failure means nothing for the part
    output:   file in the results folder that takes stdout; the log of the part takes it by default
    environment: variables besides those of every part
    batch:    the command prints names of tests, which this one runs, BATCH at a time, in the order of TESTS
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

    seconds: the time in the table
    answers: the question that the part settles
    needs:   a program on PATH without which the part does not run
    """

    name: str
    seconds: float
    answers: str
    steps: tuple[Step, ...]
    needs: str = ""


def fill(command: str, values: Mapping[str, str]) -> list[str]:
    """The words of a command, with values in place of $names; $arguments may be several words.

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


def _json(tried: Sequence[Mapping[str, object]]) -> list[str]:
    return [json.dumps(options) for options in tried]


# -- the forward routes, the fused backward pass, ring steps -------------------------------------------------

ROUTES = ({"ROUTE": "loops"}, {"ROUTE": "gluon"}, {"ROUTE": "specialised"}, {"FUSED_BACKWARD": True})
LONG = tuple(f"{mask}-16k-*" for mask in ("causal", "full", "document", "window"))
NARROW, RING = "causal-h64x8-d64x64-16k-*", "causal-s2-ring-16k-*"
SHORT = tuple(f"{mask}-8k-*" for mask in ("causal", "full", "document", "window"))
EIGHT_RANKS = "causal-s8-ring-32k-fwd"
TRIED = _options("--try", _json(ROUTES))
_NAMES = (OURS, *(variant(options) for options in ROUTES[1:]))

# Compiling needs a core each, timing needs the GPU alone: so each kernel is compiled first, by a process that
# runs one contender of one problem. Other lengths and the explicit loops launch the same kernels.
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
    + _options("--try", _json(TILES)),
))  # fmt: skip
AUTOTUNE = Step((
    "$python -m tritoncp autotune --worst $out --out $out/configs --jobs $jobs --budget ${seconds}s",
))  # fmt: skip
FLEX = _options("--contenders", ("flex", "flex flash", "flex max-autotune", "flash", "cudnn"))
# perf.run starts the tuned variant only where as much time is left as the others took. With this budget it
# always does: cut off, it loses nothing but its own line, and without it no ratio is reported.

# -- tests ---------------------------------------------------------------------------------------------------

SMOKE = "tests/gpu/test_smoke.py"
OVERLAP = "tests/gpu/test_overlap.py"  # compares times, and has the GPU alone
# In this order; files that are not named come before the last two, whose kernels may never end.
TESTS = ("answers", "steps", "worlds", "few_rows", "varlen", "descriptors")
LAST = ("specialised", "gluon")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for each of many processes


def batches(names: Sequence[str]) -> list[list[str]]:
    """Tests in the order that is most telling, ten to a batch; those that may hang in batches of their own.

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
        "what of the package works on this GPU",
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
                environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # or its pool hides the bounds
            ),
        ),
        needs="compute-sanitizer",
    ),
)


def timetable(parts: Sequence[Part], budget: float) -> Iterator[tuple[Part, float, float]]:
    """Each part with the seconds after the start by which it begins and has to end.

    >>> [(part.name, begin, end) for part, begin, end in timetable(PARTS[:2], BUDGET)]
    [('check', 10.0, 70.0), ('routes', 70.0, 165.0)]
    """
    scale, begin = budget / BUDGET, START
    for part in parts:
        yield part, begin * scale, (begin + part.seconds) * scale
        begin += part.seconds
