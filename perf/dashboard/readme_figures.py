"""The README's block of measured figures, which `tritoncp perf ingest` updates in a checkout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.records.history import Point
from tritoncp.perf.suite.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NOTHING = (
    "**Not yet measured on a GPU: no kernel has run on one.** They are compiled for A100, H100, B200 and\n"
    "[executed instruction by instruction on a CPU](docs/compiled_kernels.md), against float64, with memory\n"
    "and race checks; for MI300 they are compiled only. No time here or in `docs/` comes from a GPU:\n"
    "`make gpu` on such a machine measures them."
)
BASELINES = {"flex": "flex", "flash": "flash", "cudnn": "cuDNN"}
LENGTH = 16384  # the table shows cases of this length only, if there are any


def format_figures(points: Iterable[Point]) -> str:
    """Format the block for a history: a table of each GPU's newest figures, or a line that there are none.

    >>> from tritoncp.perf.records.history import Series
    >>> took = {"tritoncp": {"ms": 5.0, "tflops": 440.0}, "flash": {"ms": 6.0}}
    >>> where, env = Series("NVIDIA H200"), {"cuda": "13.0"}
    >>> point = Point("r", "2026-02-03T00:00:00+00:00", "causal-16k-fwd", where, env, took)
    >>> print(format_figures([point]).splitlines()[-1])
    | causal-16k-fwd | 5 | 440 | – | 1.20 | – |
    """
    by_device: dict[str, list[Point]] = {}
    names = {case.name for case in CASES}
    for point in sorted(points, key=lambda point: point.time):
        if point.env.get("cuda") and point.ms and point.case in names:
            by_device.setdefault(point.series.device, []).append(point)
    tables = [_format_table(device, points) for device, points in sorted(by_device.items())]
    return "\n\n".join(tables) if tables else NOTHING


def _format_table(device: str, points: Sequence[Point]) -> str:
    """Format a GPU's newest figures. ``points`` are in order of time."""
    of_case: dict[str, list[Point]] = {}
    for point in points:
        of_case.setdefault(point.case, []).append(point)
    problems = {case.name: case.problem for case in CASES if case.name in of_case}
    long = [name for name, problem in problems.items() if problem.seq == LENGTH and problem.world == 1]
    names = long or list(problems)
    last = max((of_case[name][-1] for name in names), key=lambda point: point.time)
    env = ", ".join(
        f"{name} {_strip_markup(last.env[name])}"
        for name in ("torch", "triton", "driver")
        if name in last.env
    )
    head = ["case", "ms", "TFLOP/s", *(f"÷ {name}" for name in BASELINES.values())]
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *(_format_row(name, of_case[name]) for name in names)]
    caption = (
        f"Measured on {_strip_markup(device)} on {_strip_markup(last.time[:10])} ({env}); ÷ is the time of a "
        "baseline over tritoncp's in the same run, of flex the best of its variants where max-autotune is "
        "one of them:"
    )
    return "\n".join([caption, "", *(f"| {' | '.join(row)} |" for row in rows)])


def _format_row(name: str, points: Sequence[Point]) -> list[str]:
    """Format the row of a case. Each ratio is from the newest line that has the baseline."""
    own = points[-1].own
    ratios: dict[str, float] = {}
    for point in points:
        ratios |= point.speedups()
    cells = [f"{ratios[family]:.2f}" if family in ratios else "–" for family in BASELINES]
    rate = own.get("tflops")
    return [name, f"{own['ms']:.4g}", f"{rate:.0f}" if isinstance(rate, int | float) else "–", *cells]


def _strip_markup(text: object) -> str:
    """Remove Markdown, HTML and line ends from text.

    >>> _strip_markup("a|b <!-- x -->\\n[y](z) `c` sm_90")
    'a b !-- x -- y z c sm 90'
    """
    cleaned = (c if c.isalnum() or c in " .,:;+-!?/%" else " " for c in str(text))
    return " ".join("".join(cleaned).split())[:80]


def rewrite(page: Path, block: str, begin: str = BEGIN, end: str = END) -> bool:
    """Replace the block between two marks of a page. Returns whether the page changed. Raises InputError for
    a page without the marks."""
    text = page.read_text()
    head, opening, rest = text.partition(begin)
    _, closing, tail = rest.partition(end)
    if not (opening and closing):
        raise InputError(
            f"{page}: the page has no {begin} followed by {end}: put both where the block belongs"
        )
    updated = f"{head}{begin}\n{block}\n{end}{tail}"
    if updated != text:
        page.write_text(updated)
    return updated != text
