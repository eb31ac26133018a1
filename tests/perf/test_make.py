"""`make gpu` gets as far as it can and says what went wrong, on a machine whose python is a stand-in."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands for a python with torch, a GPU and xdist; writes down what it is asked to run, and fails on request.
PYTHON = """#!/bin/sh
case "$*" in
    *sys.executable*) echo "$0" ;;
    *is_available*|*xdist*) ;;
    *) echo "$*" >> "$LOG"; case "$*" in $FAIL) exit 1 ;; esac ;;
esac
"""


def make_gpu(folder: Path, fail: str) -> tuple[int, str, list[str]]:
    python, log = folder / "python", folder / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={python}", f"OUT={folder}"],
        cwd=ROOT,
        env=outside | {"LOG": str(log), "FAIL": fail},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, log.read_text().splitlines()


@pytest.mark.parametrize(
    ("fail", "wrong"),
    [
        ("nothing", ""),
        ("*pytest*", " smoke tests"),
        ("*test_smoke.py", " smoke"),
        ("*perf.run*", " benchmark"),
    ],
)
def test_every_part_runs_and_the_status_tells(tmp_path, fail, wrong):
    status, said, ran = make_gpu(tmp_path, fail)
    assert ["smoke" in ran[0], "tests/gpu" in ran[1], "tritoncp.perf.run" in ran[2]] == [True] * 3
    assert len(ran) == 3 and str(tmp_path) in ran[2]
    assert bool(status) == bool(wrong) and (f"not well:{wrong}" in said) == bool(wrong)
