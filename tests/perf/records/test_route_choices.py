"""The default route comes from lines that compare routes, for calls like the measured ones only."""

import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.perf.synthetic_history import H200
from tritoncp.kernels import route_check
from tritoncp.ops import tile_lookup, tile_tables
from tritoncp.perf.cli import perf
from tritoncp.perf.records.history import Point, Series, append, variant
from tritoncp.perf.records.ingest import ingest

DEVICE = tile_tables.Device("sm_90", "NVIDIA H200")
ENV = {"arch": "sm_90", "triton": "3.6.0", "sources": "abc", "cuda": "13.0"}
CAUSAL = "route", "bfloat16", 128, 128, "causal", 0
WRONG = {"why": "wrong: relative error of the whole or of the worst rows is out of tolerance"}
WHEN = "2026-02-03T00:00:00+00:00"


def line(case="causal-16k-fwd", loops=5.0, gluon=4.0, when=WHEN, env=ENV, **rest) -> Point:
    """Make a line with times in milliseconds, or figures, of routes; None leaves a route out."""
    took = {"tritoncp": {"ms": 1.0}}
    for route, ms in (("loops", loops), ("gluon", gluon)):
        if ms is not None:
            took[variant({"ROUTE": route})] = {"ms": ms} if isinstance(ms, float) else ms
    return Point("r", when, case, H200, env, took | rest)


@pytest.fixture
def shipped(tmp_path):
    """Return a function that returns the entries, by key, that `perf ingest` ships for lines."""

    def take(*points: Point):
        folder = tmp_path / f"gpu{time.time_ns()}"
        folder.mkdir()
        for point in points:
            append(folder / "2026-02-03-nvidia-h200.jsonl", point.as_line())
        result = ingest(folder, tmp_path / "history", tmp_path / "configs")
        assert result.problems == [] and result.added + result.present == len(points)
        path = tile_tables.path_in(tmp_path / "configs", DEVICE, "3.6.0")
        return (
            {tile_tables.entry_key(entry): entry for entry in tile_tables.read(path)} if path.exists() else {}
        )

    return take


def test_the_fastest_right_route_becomes_the_default_of_calls_like_the_measured_one(
    shipped, tmp_path, monkeypatch
):
    entries = shipped(line(), line("full-16k-fwd", gluon=WRONG), line("document-8k-fwd", gluon=3.0))
    routes = {key[4]: entry["config"]["ROUTE"] for key, entry in entries.items()}
    assert routes == {"causal": "gluon", "interval": "gluon"}
    entry = entries[CAUSAL]
    assert (entry["ms"], entry["rule_ms"], entry["time"], entry["code"]) == (4.0, 5.0, WHEN, "abc")
    assert entry["shape"] == "32x8,128,16384"
    monkeypatch.setattr(tile_tables, "SHIPPED", tmp_path / "configs")
    monkeypatch.setattr(tile_tables, "user_folder", lambda: None)
    monkeypatch.setattr(tile_tables, "installed_version", lambda package: "3.6.0")
    tile_tables.forget()
    text = tile_tables.table(DEVICE, None)
    selected = dict(tile_lookup.choose_tiles(text, "bfloat16", (128, 128), "causal", 0))
    assert selected["route"] == (("ROUTE", "gluon"),)
    for other in (("float16", (128, 128), "causal", 0), ("bfloat16", (64, 64), "causal", 0),
                  ("bfloat16", (128, 128), "window", 0), ("bfloat16", (128, 128), "causal", 1)):  # fmt: skip
        assert "route" not in dict(tile_lookup.choose_tiles(text, *other))
    tile_tables.forget()


@pytest.mark.parametrize(
    "point",
    [
        line(gluon=4.92),  # less than 2 %
        line(gluon=WRONG),
        line(gluon={"ms": 1.0, "why": "wrong: as somebody says"}),
        line(loops=None),  # "tritoncp" may be a route already
        line(loops=WRONG),
        line("causal-16k-bwd"),
        line("softcap-16k-fwd"),
        line("sinks-h64x8-d64x64-8k-fwd"),
        line("causal-s2-ring-16k-fwd"),
        line("full-q1-32k-fwd"),
        line("of another version"),
        line(env=ENV | {"arch": 9}),
        line(env={}),
        line(when="2026-02-03"),  # without a time zone
        line(when="9999-01-01T00:00:00+00:00"),  # in the future
        line(when="today"),
    ],
)
def test_lines_that_compare_no_routes_ship_nothing(point, shipped):
    assert shipped(point) == {}


def test_where_lengths_disagree_the_longer_one_counts_then_the_newer(shipped):
    short = line("causal-8k-fwd", gluon=2.0, when="2026-02-04T00:00:00+00:00")
    older = line(gluon=1.0, when="2026-02-02T00:00:00+00:00")
    long = line(gluon=3.0)
    assert shipped(long, short, older)[CAUSAL]["ms"] == 3.0


def test_a_route_that_lost_loses_its_entry_and_older_lines_do_not_bring_it_back(shipped):
    assert CAUSAL in shipped(line())
    lost = line(gluon=6.0, when="2026-02-05T00:00:00+00:00")
    assert shipped(lost) == {}
    assert CAUSAL in shipped(line(when="2026-02-06T00:00:00+00:00"))
    older = line(gluon=1.0, when="2026-02-04T00:00:00+00:00")
    assert shipped(older)[CAUSAL]["ms"] == 4.0
    wrong = line(gluon=WRONG, when="2026-02-07T00:00:00+00:00")
    assert shipped(wrong) == {}


def test_a_route_that_failed_its_verification_loses_its_entry(shipped):
    """The benchmark records the verification's own words, not a time."""
    assert CAUSAL in shipped(line())
    out = torch.zeros(1, 1, 4, 2)
    difference = route_check._describe_difference({"out": out}, {"out": out + 1}, torch.float32)
    why = f"RequestedRouteWarning: ROUTE='gluon' is requested; this step goes by 'loops': {difference}"
    later = "2026-02-05T00:00:00+00:00"
    assert shipped(line(gluon={"why": why}, when=later)) == {}


def test_tiles_that_were_searched_for_the_same_route_stay(shipped, tmp_path):
    searched = {"kernel": "route", "dtype": "bfloat16", "head_dim": 128, "mask": "causal"}
    searched |= {"config": {"ROUTE": "gluon", "num_stages": 3}, "time": "2026-01-01T00:00:00+00:00"}
    tile_tables.write(tmp_path / "configs", DEVICE, [searched], {}, "3.6.0")
    assert shipped(line())[CAUSAL] == searched
    newer = line(gluon=3.0, when="2026-02-08T00:00:00+00:00")
    assert shipped(newer)[CAUSAL] == searched


@pytest.mark.parametrize("name", ["../../x", "sm_90/../x", "x" * 300])
@pytest.mark.parametrize("field", ["arch", "triton"])
def test_a_line_with_a_path_as_a_name_is_refused(field, name, tmp_path):
    gpu = tmp_path / "gpu"
    gpu.mkdir()
    append(gpu / "2026-02-03-x.jsonl", line(env=ENV | {field: name}).as_line())
    words = ["ingest", str(gpu), "--history", str(tmp_path / "h"), "--configs", str(tmp_path / "c")]
    result = CliRunner().invoke(perf, words)
    assert result.exit_code == 2 and "no file is called after it" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["gpu"]


def test_each_device_and_triton_version_has_its_own_routes(tmp_path, shipped):
    other = replace(line(), series=Series("NVIDIA H100"))
    shipped(line(), other, line(env=ENV | {"triton": "3.7.1"}))
    names = sorted(path.name for path in (tmp_path / "configs/sm_90").glob("*.json"))
    assert names == [
        f"nvidia-{x}.json" for x in ("h100-triton-3.6.0", "h200-triton-3.6.0", "h200-triton-3.7.1")
    ]
