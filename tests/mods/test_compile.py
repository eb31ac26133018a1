"""Compilation of translated mods for sm_90 without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_mod_compiles_for_sm_90(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRITONCP_CACHE_DIR": str(tmp_path / "mods")}
    command = [sys.executable, "-m", "tests.mods.offline"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["cubins"] == report["mods"] > 80
    assert report["window in 64 bits"] == []
    assert report["tenth"], "a float64 literal lost its digits"
    assert report["atomics"] > 0
    assert report["exact atomics"] == [["u64"]] * 3
    assert report["no atomics"] == 0
