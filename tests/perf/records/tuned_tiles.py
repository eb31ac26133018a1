"""Files as `tritoncp autotune` writes them, and shipped entries."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from tritoncp.kernels.tile_rules import default
from tritoncp.ops import tile_tables

H200 = tile_tables.Device("sm_90", "NVIDIA H200")
TRITON = "3.6.0"
FORWARD = "forward", "bfloat16", 128, 128, "causal", False
DQ = "dq", "bfloat16", 128, 128, "causal", False
ROUTE = "route", "bfloat16", 128, 128, "causal", False
CONFIGS = {key: asdict(default(key[0], "sm_90", 128, torch.bfloat16)) for key in (FORWARD, DQ)}


def entry_of(key, ms: float, rule_ms: float = 1.0, **config) -> dict:
    kernel, dtype, head_dim, _, mask, _ = key
    tiles = {"ROUTE": "gluon"} if kernel == "route" else CONFIGS[key]
    config = {**tiles, **config}
    return {"kernel": kernel, "dtype": dtype, "head_dim": head_dim, "mask": mask, "config": config} | {
        "ms": ms,
        "rule_ms": rule_ms,
    }


def tune(gpu: Path, *entries: dict, time: str = "2026-01-02T00:00:00+00:00") -> Path:
    """Write a file of measured tiles; by default two kernels win by a quarter. Return its path."""
    rows = [*entries] or [entry_of(FORWARD, 0.8, num_stages=4), entry_of(DQ, 0.8, num_stages=4)]
    return tile_tables.write(gpu / "configs", H200, rows, {"code": "abc", "time": time}, TRITON)


def shipped(configs: Path) -> dict:
    """Return the shipped entries by key."""
    path = tile_tables.path_in(configs, H200, TRITON)
    return {tile_tables.entry_key(e): e for e in tile_tables.read(path)} if path.exists() else {}


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change the JSON of a file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
