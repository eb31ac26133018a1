"""Tests by the lines that they run: measured once, by coverage with a context for each test."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from coverage import CoverageData

from tests.mutants.sample import MODULES, ROOT, Mutant, copy_checkout

BUILD = ROOT / "build" / "mutants"
# Of tests/.
SUITE = (*MODULES, "ops", "api", "multiprocess", "test_cli.py", "test_fuzz.py", "repo/test_doctests.py")
# Tests of the defaults of public functions, and of the kernels that were compiled, by package.
BESIDE = {
    "": "repo/test_public_surface.py::test_the_public_surface_is_unchanged",
    "kernels/": "analysis/test_resource_table.py"
    "::test_the_table_was_made_from_the_kernels_and_tiles_that_are_here",
}


def measure_lines(jobs: int) -> None:
    """Run the suite in a copy. Write seconds.json, of tests that pass, and lines.json: their numbers by file
    and line."""
    with tempfile.TemporaryDirectory() as folder:
        copy, measured = copy_checkout(Path(folder, "copy")), Path(folder, "measured")
        measured.mkdir()
        parts = [f"tests/{name}" for name in SUITE if (copy / "tests" / name).exists()]
        parts += [f"tests/{test}" for test in BESIDE.values()]
        command = [sys.executable, *f"-m pytest -q -n {jobs} -p tests.mutants.contexts".split(), *parts]
        command.append("--ignore=tests/kernels/test_compiled.py")  # its kernels run in separate processes
        subprocess.run(command, cwd=copy, env=os.environ | {"MUTANTS_FOLDER": str(measured)}, check=False)
        collect_lines(copy, measured)


def collect_lines(copy: Path, measured: Path) -> None:
    seconds: dict[str, float] = {}
    for path in measured.glob("seconds.*"):
        seconds |= json.loads(path.read_text())
    numbers = {test: number for number, test in enumerate(seconds)}
    lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in measured.glob("lines.*"):
        data = CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                lines[str(Path(file).relative_to(copy))][line].update(
                    numbers[x] for x in tests if x in numbers
                )
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "seconds.json").write_text(json.dumps(seconds))
    (BUILD / "lines.json").write_text(json.dumps(lines, default=list))


@cache
def read_measured(name: str) -> dict[str, Any]:
    return json.loads((BUILD / f"{name}.json").read_text())


def lines_of_statement(path: str, line: int) -> range:
    """The lines of the innermost statement around a line, without the statements in it."""
    inner = max(statements_around(path, line), key=lambda x: x.lineno)
    body = getattr(inner, "body", None)
    return range(inner.lineno, body[0].lineno if body else (inner.end_lineno or 0) + 1)


def lines_of_function(path: str, line: int) -> range:
    """The lines of the innermost function around a line, else of the statement around it."""
    around = statements_around(path, line)
    functions = [x for x in around if isinstance(x, ast.FunctionDef)]
    inner = max(functions or around, key=lambda x: x.lineno)
    return range(inner.lineno, (inner.end_lineno or 0) + 1)


def statements_around(path: str, line: int) -> list[ast.stmt]:
    statements = [x for x in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(x, ast.stmt)]
    return [x for x in statements if x.lineno <= line <= (x.end_lineno or 0)]


def choose_tests(mutant: Mutant, most: float) -> list[str]:
    """Return the tests that run the statement of a mutant, or its file if it runs at import; no more than
    take ``most`` seconds without it. Cheap tests come first, tests of rare lines of its function, the first
    case of each test, and tests named for the module or in a folder of its packages; tests of BESIDE come
    last."""
    of_lines = read_measured("lines").get(mutant.path, {})
    own_lines = [of_lines.get(str(line)) for line in lines_of_statement(mutant.path, mutant.line)]
    chosen = {test for tests in own_lines if tests for test in tests}
    if not chosen and [] in own_lines:
        chosen = {test for tests in of_lines.values() for test in tests}
    rarity: dict[int, float] = defaultdict(lambda: 0.001)
    for line in lines_of_function(mutant.path, mutant.line):
        for test in (tests := of_lines.get(str(line), [])):
            rarity[test] += 1 / len(tests)
    seconds, cases, costs = read_measured("seconds"), defaultdict(int), {}
    path = Path(mutant.path)
    own, of_module = tuple(f"tests/{name}/" for name in path.parts[:-1]), f"/test_{path.stem}.py::"
    names = list(seconds)
    for number in sorted(chosen, key=lambda number: (seconds[names[number]], names[number])):
        test = names[number]
        cases[test.partition("[")[0]] += 1
        distance = 1 if of_module in test else 2 if test.startswith(own) else 4
        case = cases[test.partition("[")[0]]
        costs[test] = (0.05 + seconds[test]) * distance * case**2 / rarity[number]
    result, spent = [], 0.0
    for test in sorted(costs, key=lambda test: (costs[test], test)):
        spent += seconds[test]
        if spent <= most or not result:
            result.append(test)
    beside = [f"tests/{test}" for folder, test in BESIDE.items() if mutant.path.startswith(folder)]
    return result + [test for test in beside if test in seconds]
