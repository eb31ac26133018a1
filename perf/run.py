"""`python -m tritoncp.perf.run`: measure, write each finding as it is made, show a table.

A run that is cut off leaves every line it had: the file is appended to, a line at a time.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tier", type=click.Choice(["smoke", "core", "full"]), default="core", show_default=True)
@click.option(
    "--only", "--filter", "only", default="*", metavar="PATTERN", help="Cases by name: 'causal-*-bwd'."
)
@click.option("--budget", type=float, default=300.0, show_default=True, help="Seconds; starts nothing after.")
@click.option("--seconds", type=float, default=1.5, show_default=True, help="Seconds of rounds for a case.")
@click.option(
    "--try",
    "options",
    multiple=True,
    metavar="JSON",
    help="""Also time tritoncp with these kernel options, as '{"BLOCK_N": 64}'; as often as you like.""",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("perf/history"),
    show_default=True,
    help="Folder of <date>-<gpu>.jsonl, which is appended to.",
)
@click.option("--json", "as_json", is_flag=True, help="The same JSON lines on stdout, instead of the table.")
def main(
    tier: str,
    only: str,
    budget: float,
    seconds: float,
    options: tuple[str, ...],
    device: str,
    out: Path,
    as_json: bool,
) -> None:
    """Time tritoncp against PyTorch's own attention, most important cases first.

    Every contender's answer is checked before it is timed. On a CPU (--device cpu) each case runs once on a
    tiny shape with interpreted kernels, which checks the benchmark and measures nothing. Exits with 1 if
    tritoncp fails or is wrong in any case.
    """
    deadline = time.monotonic() + budget
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    import torch

    from tritoncp.perf.cases import select
    from tritoncp.perf.machine import environment
    from tritoncp.perf.measure import Bench, ceilings

    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(
            "torch finds no GPU here; --device cpu checks the benchmark itself on tiny shapes"
        )
    cases = select(tier, only)
    if not cases:
        raise click.ClickException(f"no case of tier {tier} is named like {only!r}")
    about = environment(torch.device(device))
    out.mkdir(parents=True, exist_ok=True)
    day = datetime.date.today().isoformat()
    path = out / f"{day}-{re.sub(r'[^a-z0-9]+', '-', about['device'].lower())}.jsonl"
    with path.open("a") as file:
        journal = Journal(file, as_json)
        journal.write({"kind": "run", **about, "tier": tier, "only": only, "budget_s": budget})
        if device == "cuda":
            journal.write({"kind": "ceilings", **ceilings(torch.device(device))})
        tried = [json.loads(text) for text in options]
        bench = Bench(torch.device(device), journal.write, deadline, seconds, tried)
        bench.run(cases)
    if not as_json:
        show(journal.lines, path)
    sys.exit(1 if bench.failures else 0)


class Journal:
    """Lines of one run: in the file at once, and on the screen."""

    def __init__(self, file: TextIO, as_json: bool) -> None:
        self.file, self.as_json = file, as_json
        self.lines: list[dict[str, Any]] = []
        self.run = hashlib.sha256(f"{time.time_ns()}{os.getpid()}".encode()).hexdigest()[:12]

    def write(self, line: dict[str, Any]) -> None:
        line = {"run": self.run, **line}
        self.lines.append(line)
        text = json.dumps(line)
        self.file.write(text + "\n")
        self.file.flush()
        click.echo(text if self.as_json else brief(line), err=not self.as_json)


def brief(line: dict[str, Any]) -> str:
    """One line for people.

    >>> brief({"kind": "time", "case": "full-8k-fwd", "contender": "flex", "ms": 1.5, "tflops": 400.0})
    'full-8k-fwd            flex                      1.500 ms    400.0 TFLOP/s'
    """
    name = f"{line.get('case', ''):<22} {line.get('contender', ''):<20}"
    if line["kind"] == "time":
        return f"{name} {line['ms']:>10.3f} ms {line['tflops']:>8} TFLOP/s"
    if line["kind"] == "check":
        return f"{name} {'right' if line['ok'] else line['why']} ({line['setup_s']} s)"
    if line["kind"] == "left out":
        return f"{name} left out: {line['why']}"
    if line["kind"] == "standing":
        return f"{name} {' '.join(f'÷{key} {x}' for key, x in line['speedup'].items())}"
    return " ".join(f"{key}={value}" for key, value in line.items() if key not in ("run", "kind"))


def show(lines: list[dict[str, Any]], path: Path) -> None:
    """The table: tritoncp's time, and everyone's best over it, worst first against the goal."""
    from rich.console import Console
    from rich.table import Table

    last = {line["case"]: line for line in lines if line["kind"] == "standing"}  # the most thorough search
    standings = list(last.values())
    families = sorted({name for line in standings for name in line["speedup"]})
    table = Table(
        "case", "tritoncp ms", *(f"÷ {name}" for name in families), title="time over tritoncp's (goal)"
    )
    for line in sorted(standings, key=_distance):
        cells = []
        for name in families:
            ratio, goal = line["speedup"].get(name), line["goal"].get(name)
            text = "–" if ratio is None else f"{ratio:.2f}" + (f" ({goal})" if goal else "")
            cells.append(f"[red]{text}[/]" if ratio is not None and goal and ratio < goal else text)
        table.add_row(line["case"], f"{line['ms']:.3f}", *cells)
    console = Console()
    console.print(table)
    for line in lines:
        if line["kind"] == "check" and not line["ok"]:
            console.print(f"{line['case']}: {line['contender']}: {line['why']}", markup=False)
    console.print(f"every line is in {path}", markup=False)


def _distance(line: dict[str, Any]) -> float:
    """The worst ratio over its goal; what has no goal comes last."""
    speedup = line["speedup"]
    return min((speedup[name] / goal for name, goal in line["goal"].items() if name in speedup), default=9.0)


if __name__ == "__main__":
    main()
