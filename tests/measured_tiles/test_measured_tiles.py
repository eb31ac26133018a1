"""Tests of calls that use measured tile shapes and routes."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from tests.cases import Case, agree, expected
from tests.measured_tiles.measured_tiles import CPU, USER, attend, configs, entry, launched, places, put
from tests.multiprocess import ranks
from tests.multiprocess.case_on_ranks import on_rank
from tritoncp import causal, create_block_mask, flex_attention
from tritoncp.analysis.jobs import VARIANT_OF_KIND, VARIANTS
from tritoncp.kernels import engine
from tritoncp.kernels.tile_rules import Config
from tritoncp.measured_tiles import tile_lookup, tile_tables
from tritoncp.measured_tiles.tile_lookup import MEASURED_KINDS
from tritoncp.measured_tiles.tile_tables import Device
from tritoncp.perf.problem import Problem
from tritoncp.reference.dense import dense_attention

__all__ = ["launched", "places"]  # fixtures


def test_calls_use_measured_tiles_and_options_override_them(places, launched):
    put(places / USER, 16, CPU)
    attend(causal())
    assert dict(launched)["forward"] == 16 and dict(launched)["dq"] == 128
    launched.clear()
    attend(causal(), fwd_BLOCK_M=64)
    assert dict(launched)["forward"] == 64


def test_calls_with_a_score_mod_and_fused_calls_use_separate_tiles(places, launched):
    measured = [entry(16), entry(64, score="softcap"), entry(32, "fused", score="alibi")]
    tile_tables.write(places / USER, CPU, measured, {})

    def doubled(score, b, h, q, kv):
        return score * 2

    attend(causal())
    assert dict(launched)["forward"] == 16
    attend(causal(), doubled)
    assert dict(launched)["forward"] == 64 and dict(launched)["dkdv"] == 128
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    launched.clear()
    attend(causal(), doubled, compiled, FUSED_BACKWARD=True)
    assert dict(launched) == {"forward": 64, "delta": 64, "dkdv": 32}


ROUTED = {"kernel": "route", "config": {"ROUTE": "gluon", **asdict(Config(64, 32))}}


def test_a_route_applies_only_to_calls_equal_to_the_measured_one(places):
    """A route was verified only for its call, device and Triton version."""

    def look_up(**changes):
        call = {"dtype": torch.float32, "dims": (16, 16), "mask": "causal"} | changes
        options = configs(torch.device("cpu"), **call)
        return dict(options.get("CONFIGS", ())).get("route")

    tile_tables.write(places / USER, CPU, [entry(16), entry(16, head_dim=32), entry(16) | ROUTED], {})
    assert look_up() == (("ROUTE", "gluon"),)
    other_calls = [{"mask": "full"}, {"mask": "interval"}, {"dims": (16, 8)}, {"score": True}]
    assert not any(look_up(**other) for other in [*other_calls, {"dims": (32, 32)}, {"dtype": torch.float16}])
    won = {"kernel": "route", "config": {"ROUTE": "loops", **asdict(Config(64, 32))}}
    tile_tables.write(places / "given", CPU, [entry(16) | won], {})
    assert look_up() is None and configs(torch.device("cpu"), torch.float32, (16, 16), "causal")
    for path in places.rglob("*.json"):
        path.unlink()
    for device, triton in ((CPU, "3.6.0"), (Device("interpreter", "another"), None)):
        tile_tables.write(places / USER, device, [entry(16), entry(16) | ROUTED], {}, triton)
        assert look_up() is None and tile_lookup.local_table(torch.device("cpu"))


@pytest.fixture
def kernels(launched):
    """Return the kernels of one forward pass."""

    def run(rows=128, **options):
        launched.clear()
        q, k, v = torch.randn(1, 1, rows, 16), *torch.randn(2, 1, 1, 128, 16).unbind()
        mask = create_block_mask(lambda b, h, q, kv: q + 128 - rows >= kv, 1, 1, rows, 128, BLOCK_SIZE=64)
        out = flex_attention(q, k, v, mask, kernel_options=options or None)
        torch.testing.assert_close(out, dense_attention(q, k, v, mask).out, atol=2e-6, rtol=1e-5)
        return [kernel for kernel, _ in launched]

    return run


@pytest.mark.long
def test_calls_use_the_measured_route_if_it_is_available(places, kernels, monkeypatch):
    """Only calls that request a route warn about it. The loops replace the route, which needs compiled
    kernels."""
    loops, obstacles, steps = ["forward"], ["in the way"], []

    def launch(own, *args):
        steps.append(own)
        return own.loops(*args)

    tile_tables.write(places / USER, CPU, [entry(64) | ROUTED | {"mask": "interval"}], {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels() == loops, "a CPU has no such route"
        with monkeypatch.context() as patch:
            route = SimpleNamespace(launch=launch, obstacles=lambda *args: iter(obstacles))
            patch.setattr(engine, "route_of", lambda name: route)
            assert kernels() == loops and not steps
            obstacles.clear()
            assert kernels() == loops and len(steps) == 1
            for options in ({"ROUTE": "loops"}, {"PACK_GQA": True}, {"BLOCK_N": 32}, {"rows": 64}):
                assert kernels(**options) == loops and len(steps) == 1, options
            assert kernels(SPLIT_KV=2) == [*loops, "combine"] and len(steps) == 1
            assert kernels(ROUTE="gluon") == loops and len(steps) == 2
    with pytest.raises(ValueError, match="cannot be interpreted"):
        kernels(ROUTE="gluon")


def test_few_rows_use_their_entry_for_every_mask(places):
    """A process with no other entries is warned to tune."""
    tile_tables.write(places / USER, CPU, [entry(64, "few", mask="full")], {})
    for mask in ("full", "causal", "interval", "mod", "window"):
        options = configs(torch.device("cpu"), torch.float32, (16, 16), mask)
        assert dict(dict(options["CONFIGS"])["few"])["BLOCK_M"] == 64
        assert not tile_lookup.has_pass_tiles(options["CONFIGS"])


@pytest.mark.long
@pytest.mark.bar(23)
def test_ranks_with_different_files_of_tiles_have_the_results_of_one_rank(places, launched, monkeypatch):
    """Each rank launches the tiles that its host measured; messages and results do not depend on them."""
    case = Case(
        world=2,
        balancer="head_tail",
        schedule="ring",
        length=128,
        kv_length=128,
        block=32,
        dims=(16, 16),
        dtype=torch.float32,
    )

    def on_own_host(group):
        folder = places / str(group.rank())
        monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(folder))
        put(folder, 16 << group.rank(), CPU)
        answers = on_rank(group, case, lambda group: group)
        return answers, {block_m for kernel, block_m in launched if kernel == "forward"}

    want, by_rank = expected(case), ranks.run(2, on_own_host)
    assert [tiles for _, tiles in by_rank] == [{16}, {32}]
    for answers, _ in by_rank:
        agree(case, answers, want)


def test_written_kinds_equal_looked_up_kinds() -> None:
    """The kind of a written target equals the kind of its mask at look-up."""
    for name, kind in MEASURED_KINDS.items():
        assert (
            tile_lookup.kind_of(Problem(name, 512).block_mask()) == kind and VARIANT_OF_KIND[kind] in VARIANTS
        )
