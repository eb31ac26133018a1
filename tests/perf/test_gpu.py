"""`make gpu` runs its parts in order and in time, and reports failures; a stand-in logs the commands."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tritoncp.perf.suite.baselines import FLEX
from tritoncp.perf.suite.cases import select

ROOT = Path(__file__).parents[2]
PARTS = ["check", "warm", "routes", "tiles", "flex", "flex", "tests", "overlap", "autotune", "sanitizer"]
STAND_IN = """#!/bin/sh
case "$*" in
    *sys.executable*) echo "$0"; exit ;;
    *is_available*) exit $NO_GPU ;;
    *collect-only*) for i in $(seq 15); do echo "tests/kernels/test_x.py::test[a $i]"; done ;;
    *--json*) echo "{}" ;;
esac
echo "$*" >> "$LOG"
case "$*" in $HANG) sleep 60 & wait ;; $FAIL) exit 1 ;; esac
"""


def run_gpu(folder: Path, *command: str | Path, **more: str) -> tuple[int, str, list[str]]:
    """Return the exit code, the output and the commands that ran."""
    python, log = folder / "python", folder / "log"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (folder / "compute-sanitizer").symlink_to("/bin/true")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"PYTHON": str(python), "OUT": str(folder / "out"), "LOG": str(log)}
    env |= {"PATH": f"{folder}:{env['PATH']}", "FAIL": "-", "HANG": "-", "NO_GPU": "0"} | more
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout, log.read_text().splitlines() if log.exists() else []


def make_gpu(folder: Path, **more: str) -> tuple[int, str, list[str]]:
    words = f"PYTHON={folder / 'python'}", f"OUT={folder / 'out'}", "JOBS=2", "PARTS="
    return run_gpu(folder, "make", "gpu", *words, **more)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fail", "failed"),
    [("-", []), ("*perf.run*", ["warm", "routes", "tiles", "flex", "flex"]), ("*test_overlap*", ["overlap"])],
)
def test_all_parts_run_in_order_and_failures_do_not_stop_those_after_them(tmp_path, fail, failed):
    code, output, commands = make_gpu(tmp_path, FAIL=fail)
    started = [line.split()[1].strip(",") for line in output.splitlines() if "at most" in line]
    assert started == PARTS and code == bool(failed) * 2  # make turns a failure into 2
    assert f"make gpu: failed: {' '.join(failed)}" in output if failed else "failed" not in output
    assert sum("--warm" in line for line in commands) == 18 and (tmp_path / "out/check.json").exists()
    batches = [line for line in commands if "::test[" in line]
    counts = sorted(line.count("::") for line in batches)
    assert counts == [5, 10, 10, 10, 10], "ten tests a process of three files, names kept whole"
    assert all("--device cuda" in line for line in commands if "-m pytest" in line)


def test_a_part_that_hangs_ends_with_its_time(tmp_path):
    script = tmp_path / "perf/gpu.sh"
    script.parent.mkdir()
    script.write_text((ROOT / "perf/gpu.sh").read_text().replace("run check 60", "run check 2"))
    begin = time.monotonic()
    code, output, commands = run_gpu(tmp_path, "bash", script, HANG="*check*", PARTS="check tiles")
    assert time.monotonic() - begin < 30 and code == 1
    assert "check: out of time" in output and any("fwd_maxnreg" in command for command in commands)


def test_make_gpu_runs_nothing_without_a_gpu_and_says_so(tmp_path):
    code, _, commands = make_gpu(tmp_path, NO_GPU="1")
    assert code and not commands


def test_the_measured_cases_and_contenders_exist():
    script = (ROOT / "perf/gpu.sh").read_text()
    for names in (
        line.split('"')[1].split() for line in script.splitlines() if line.startswith(("long=", "short="))
    ):
        assert all(select("full", name) for name in names), names
    assert {"flex", "flex flash", "flex max-autotune"} <= {*FLEX}
