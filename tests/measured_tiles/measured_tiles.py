"""Measured tile shapes in empty folders, and the launches of calls that look them up, for tests."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from tritoncp import create_block_mask, flex_attention
from tritoncp.kernels import launch
from tritoncp.kernels.tile_rules import Config
from tritoncp.measured_tiles import tile_lookup, tile_tables, tune_on_first_call
from tritoncp.measured_tiles.tile_lookup import TileKey
from tritoncp.measured_tiles.tile_tables import Device
from tritoncp.reference.dense import dense_attention

H200 = Device("sm_90", "NVIDIA H200")
H100 = Device("sm_90", "NVIDIA H100 80GB HBM3")
CPU = Device("interpreter", "cpu")


def entry(block_m, kernel="forward", mask="causal", head_dim=16, dtype="float32", **more):
    config = asdict(Config(block_m, 32))
    return {"kernel": kernel, "dtype": dtype, "head_dim": head_dim, "mask": mask, "config": config, **more}


USER = "tritoncp/configs"  # of the user, in the home of configurations


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """Make the three folders of tile files, all empty."""
    tile_tables.forget()
    tile_lookup.WARNED_DEVICES.clear()
    tune_on_first_call._ATTEMPTS.clear()
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(tmp_path / "given"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tile_tables, "SHIPPED", tmp_path / "shipped")
    yield tmp_path
    tile_tables.forget()


def put(folder, block_m, device=H200, triton=None, **fields):
    path = tile_tables.path_in(folder, device, triton)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"entries": [entry(block_m, **fields)]}))


def configs(device, dtype, dims, mask, score=False):
    """Return the tile options of a call."""
    return tile_lookup.measured_options(device, TileKey.of(dtype, dims, mask, score))


@pytest.fixture
def launched(monkeypatch):
    """Record (kernel, BLOCK_M) of every launch."""
    launches = []
    original = launch.Launch.__call__

    def call(self):
        launches.append((self.kernel.__name__.removesuffix("_kernel"), self.config.BLOCK_M))
        return original(self)

    monkeypatch.setattr(launch.Launch, "__call__", call)
    return launches


def attend(mask, score=None, call=flex_attention, **options):
    q, k, v = torch.randn(3, 1, 1, 40, 16).unbind()
    q.requires_grad_()
    out = call(q, k, v, score, mask, kernel_options=options or None)
    out.sum().backward()
    mask_of_call = create_block_mask(mask, 1, 1, 40, 40)
    torch.testing.assert_close(out, dense_attention(q, k, v, mask_of_call, score).out, atol=2e-6, rtol=1e-5)
