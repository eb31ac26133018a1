"""Compilation of translated mods for sm_90 without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_process import python


@pytest.mark.long
def test_every_mod_compiles_for_sm_90(tmp_path: Path) -> None:
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    process = python("-m", "tests.mods.offline", TRITON_INTERPRET="0", **caches)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["cubins"] == report["mods"] > 80
    assert report["window in 64 bits"] == []
    assert report["tenth"], "a float64 literal lost its digits"
    assert report["atomics"] > 0
    assert report["exact atomics"] == [["u64"]] * 3
    assert report["no atomics"] == 0
