"""`make gpu` gets as far as it can, says what went wrong, and needs no more than a machine with a GPU has."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("smoke", "tests", "benchmark", "autotune")
# Stands for a python with torch and a GPU; writes down what it is asked to run, and fails on request.
STAND_IN = """#!/bin/sh
case "$*" in
    *sys.executable*) echo "$0" ;;
    *is_available*) ;;
    *"import xdist"*) exit $NO_XDIST ;;
    *collect-only*) seq -f "tests/gpu/test_some.py::test_x[a rule %g]" $COUNT ;;
    *) echo "$*" >> "$LOG"; echo "said $*"; case "$*" in $FAIL) exit 1 ;; esac ;;
esac
"""
# Runs the real thing where a GPU is not the point: tests are collected, cases are tiny, kernels only listed.
REAL = """#!/bin/sh
export PYTHONPATH="$SITE:$PYTHONPATH" TRITON_INTERPRET=0
case "$*" in
    *sys.executable*) echo "$0"; exit ;;
    *is_available*) exit ;;
    *collect-only*) ;;
    *"-m pytest"*) set -- "$@" --collect-only -q ;;
    *perf.run*) export TRITON_INTERPRET=1; set -- "$@" --device cpu --tier smoke --seconds 0.01 ;;
    *autotune*) set -- "$@" --target sm_90 --dry-run ;;
esac
exec "$BARE" -S "$@"
"""


def make_gpu(folder: Path, script: str, *words: str, **environment: str) -> tuple[int, str]:
    python = folder / "python"
    python.write_text(script)
    python.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={python}", f"OUT={folder / 'out'}", *words],
        cwd=ROOT,
        env=outside | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("fail", "wrong"),
    [
        ("nothing", ""),
        ("*-m pytest*", " smoke tests"),
        ("*test_smoke.py", " smoke"),
        ("*perf.run*", " benchmark"),
        ("*autotune*", " autotune"),
        ("*", " smoke tests benchmark autotune"),
    ],
)
def test_every_part_runs_and_the_status_tells(tmp_path, fail, wrong):
    status, said = make_gpu(tmp_path, STAND_IN, LOG=str(tmp_path / "log"), FAIL=fail, NO_XDIST="0")
    ran = (tmp_path / "log").read_text().splitlines()
    assert len(ran) == 4
    for words, own in zip(ran, ("test_smoke", "-n 12", "tritoncp.perf.run --budget", "autotune --worst")):
        assert own in words
    for part, words in zip(PARTS, ran):
        assert (tmp_path / f"out/{part}.log").read_text() == f"said {words}\n" and f"said {words}" in said
    assert all(str(tmp_path / "out") in words for words in ran[2:])
    assert 380 < int(re.search(r"--budget (\d+)", ran[2])[1]) < 425, "the time that the tests have left"
    assert bool(status) == bool(wrong) and (f"not well:{wrong}\n" in said) == bool(wrong)


@pytest.mark.parametrize(("count", "fail", "well"), [(25, "", True), (25, "*21*", False), (0, "", False)])
def test_without_xdist_the_tests_are_shared_out_all_the_same(tmp_path, count, fail, well):
    """And a collection that finds nothing has not gone well."""
    told = {"LOG": str(tmp_path / "log"), "FAIL": fail, "NO_XDIST": "1", "COUNT": str(count)}
    status, said = make_gpu(tmp_path, STAND_IN, "JOBS=2", **told)
    ran = [line for line in (tmp_path / "log").read_text().splitlines() if "test_some" in line]
    assert sorted(line.count("[a rule ") for line in ran) == ([5, 10, 10] if count else [])
    assert (status == 0) == well, said
    assert ("not well: tests\n" in said) != well


def test_all_parts_together_take_less_than_nine_minutes():
    recipe = (ROOT / "Makefile").read_text()
    limits = {name: int(limit) for name, limit in re.findall(r"part (\w+) (\d+) ", recipe)}
    assert tuple(limits) == ("smoke", "tests", "autotune")
    until = int(re.search(r"left=\$\$\(\((\d+) - SECONDS\)\)", recipe)[1])
    assert limits["smoke"] + limits["tests"] <= until - 200, "what the benchmark has at least"
    assert until + limits["autotune"] + 5 * len(PARTS) <= 540, (
        "of a part that does not end when it is told to"
    )
    assert "part benchmark $$left" in recipe and "--budget $$((left - 15))" in recipe, (
        "it is to end by itself"
    )
    assert int(re.search(r"--budget (\d+)s", recipe)[1]) + 15 <= limits["autotune"]


def test_a_machine_with_a_gpu_needs_nothing_else(tmp_path):
    """There are torch, Triton, pytest and the command line's two packages, and what these need; NumPy, which
    only interpreted kernels need. No hypothesis, no xdist, no platformdirs, nothing that draws."""
    packages = "torch", "triton", "pytest", "pytest-benchmark", "click", "rich", "numpy"
    here = linked(tmp_path / "site", packages)
    assert not here & {"hypothesis", "platformdirs", "execnet", "bokeh", "PIL"}
    site = str(tmp_path / "site")
    status, said = make_gpu(tmp_path, REAL, "ARGS=-k test_masks", BARE=sys.executable, SITE=site)
    assert status == 0, said
    out = tmp_path / "out"
    assert " tests collected" in (out / "smoke.log").read_text()
    assert re.search(r"\b[1-9]\d* tests collected", (out / "tests.log").read_text())
    (history,) = out.glob("*.jsonl")
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["contenders"]["tritoncp"]["ms"] > 0 for line in lines] == [True, True]
    assert "forward causal 32x8 d128 16384 bfloat16: " in (out / "autotune.log").read_text()


def linked(folder: Path, names: tuple[str, ...]) -> set[str]:
    """Links to what some distributions need, and to nothing else; the names at the top."""
    folder.mkdir()
    todo, seen = list(names), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        if name not in seen:
            seen.add(name)
            todo += [re.match(r"[\w.-]+", line)[0] for line in found.requires or () if "extra ==" not in line]
            for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
                if not (folder / top).exists():  # several share it
                    (folder / top).symlink_to(found.locate_file(top))
    return {path.name for path in folder.iterdir()}
