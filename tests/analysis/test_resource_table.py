"""`tritoncp inspect`: the shipped table of compiled kernels, and the regressions that it reports."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from click.testing import CliRunner

from tritoncp.analysis import disassembly, inspect_run, kernel_digest, resource_table, throughput_bound
from tritoncp.analysis.jobs import step_job
from tritoncp.analysis.kernel_digest import read_syntax
from tritoncp.analysis.launches import launch_of
from tritoncp.analysis.throughput_bound import MACHINES
from tritoncp.cli import main
from tritoncp.kernels.tile_rules import Config
from tritoncp.ops import tile_tables

UNITS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
TABLE = list(resource_table.read_table().values())
PASSES = [row for row in TABLE if row["kernel"] not in ("delta", "combine") and row["dtype"] != "float32"]
RULES = [row for row in PASSES if "source" not in row]  # without measured tiles
SPILLING = ("dkdv", "sm_80", 64, "bfloat16", "mask_mod_local")
LISTED = [*resource_table.shipped(), *resource_table.measured()]


def test_the_table_has_a_row_for_all_that_is_shipped_and_no_other() -> None:
    assert [resource_table.key(row) for row in TABLE] == [resource_table.key(job.identity) for job in LISTED]


def test_the_table_was_made_from_the_kernels_and_tiles_that_are_here(monkeypatch, tmp_path) -> None:
    """Remedy for a failure: run ``tritoncp inspect --update`` and commit the table. The table here lacks a
    row and has one of another kernel, so that exactly these two are stale."""
    older = tmp_path / "resources.json"
    resource_table.write([TABLE[0], TABLE[1] | {"digest": "of another kernel"}, *TABLE[3:]], older)
    monkeypatch.setattr(resource_table.read_table, "__defaults__", (older,))
    assert resource_table.stale(LISTED, 1) == LISTED[1:3]


def test_a_digest_ignores_comments_and_docstrings() -> None:
    def plain() -> Any:
        def f(x: int) -> int:
            return x + 1

        return f

    def explained() -> Any:
        def f(x: int) -> int:
            """One more."""
            # for everyone
            return x + 1

        return f

    def changed() -> Any:
        def f(x: int) -> int:
            return x + 2

        return f

    one, same, other = (read_syntax(make_function()) for make_function in (plain, explained, changed))
    assert one == same != other


@pytest.mark.parametrize("module", [disassembly, throughput_bound])
def test_a_digest_covers_the_modules_that_read_and_bound_machine_code(monkeypatch, module) -> None:
    launch = launch_of(step_job("delta", "sm_90", 64))
    digest = kernel_digest.hash_launch(launch)
    assert kernel_digest.hash_launch(launch) == digest
    monkeypatch.setattr(
        kernel_digest, "read_syntax", lambda code: ("changed", []) if code is module else read_syntax(code)
    )
    assert kernel_digest.hash_launch(launch) != digest


def test_shipped_kernels_spill_nothing_and_use_matrix_units() -> None:
    """No spill, no more shared memory than there is, and matrix units. One kernel, with a mask_mod, spills
    two registers outside of its loop; tiles that spill none cost 9 % of its bound."""
    for row in TABLE:
        assert row["shared_bytes"] <= MACHINES[row["arch"]].block
        most = 8 if resource_table.key(row) == SPILLING else 0
        assert row["spill_bytes"] <= most, resource_table.key(row)
    for row in PASSES:
        assert 0 < row["bound"] <= row["overlap"] <= 1 and row["limit"]
        assert row["loop_spills"] == 0
        assert resource_table.families(row["mma"]) == UNITS[row["arch"]], resource_table.key(row)


def test_no_kernel_multiplies_more_than_its_tile() -> None:
    """FLOPs issued in the loop are those of the tile, over the pieces that the head dim is cut into. Where
    there are few rows, loads are the limit, not products."""
    many = [row for row in RULES if row["variant"] not in ("few", "decode")]
    assert [resource_table.key(row) for row in many if row["flops"] != 1] == []


def test_bounds_for_hopper_against_those_of_torchs_default_tiles() -> None:
    """No pass is behind torch's default tiles by more than two hundredths of the peak, and only dQ is; masks
    that torch's table lacks are compared with its causal mask."""
    rows = [row for row in RULES if row["arch"] == "sm_90" and row["variant"] in resource_table.MASKS]
    rows = [row for row in rows if resource_table.flex(row)]
    behind = {}
    for row in rows:
        if row["kernel"] != "gluon":
            default, best = resource_table.flex(row)
            assert default <= best
            behind[row["kernel"], row["head_dim"], row["variant"]] = default - row["bound"]
    assert len(behind) == 54
    assert {kernel for (kernel, *_), points in behind.items() if points > 0} <= {"dq"}
    assert max(behind.values()) < 0.025


def test_forward_for_hopper_has_the_tiles_that_it_should() -> None:
    rows = [row for row in RULES if row["arch"] == "sm_90" and row["variant"] in resource_table.MASKS]
    for row in rows:
        if row["kernel"] == "forward" and row["head_dim"] == 128 and row["dtype"] == "bfloat16":
            assert row["config"]["BLOCK_M"] >= 128 and row["config"]["BLOCK_N"] >= 128 and row["tma"] > 0


def test_copies_are_where_the_config_says() -> None:
    for row in TABLE:
        assert (row["tma"] > 0) == row["config"]["USE_TMA"]
        assert row["tma"] == 0 or row["arch"] in ("sm_90", "sm_100")
    assert not any(row["tma"] for row in TABLE if row["variant"] == "pointers")


def test_bounds_that_fall_and_units_that_are_lost_are_named() -> None:
    was = next(row for row in PASSES if row["arch"] == "sm_90")
    assert resource_table.find_regressions(was, was) == []
    assert resource_table.find_regressions(was | {"bound": was["bound"] * 0.98}, was) == []
    for change, said in (
        ({"bound": was["bound"] * 0.96}, "bound"),
        ({"flops": 2.0}, "issues 2.0 times"),
        ({"spill_bytes": 8}, "8 spilled bytes, before 0"),
        ({"loop_spills": 2}, "2 spills in the loop"),
        ({"touched": 3}, "3 instructions touch registers of products"),
        ({"shared_bytes": 300_000}, "300000 bytes of shared memory, there are 232448"),
        ({"mma": {"HMMA.16816": 3}}, "by HMMA, before by HGMMA"),
        ({"failed": "it broke"}, "it broke"),
    ):
        assert any(said in line for line in resource_table.find_regressions(was | change, was)), said
    assert resource_table.find_regressions(was | {"tma": 0}, was | {"tma": 4}) == ["no TMA any more"]
    said = "608 columns of tensor memory, there are 512"
    assert resource_table.find_regressions(was | {"tensor_columns": 608}, was) == [said]
    assert resource_table.find_regressions(was, None) == [
        "not in the table: tritoncp inspect --update writes it"
    ]


def test_writing_rows_leaves_the_others_alone(tmp_path) -> None:
    path = tmp_path / "configs/resources.json"
    resource_table.write(TABLE[:3], path)
    resource_table.write([TABLE[1] | {"registers": 7}], path)
    assert list(resource_table.read_table(path).values()) == [TABLE[0], TABLE[1] | {"registers": 7}, TABLE[2]]


def test_check_reports_a_regression(monkeypatch, tmp_path) -> None:
    """Compile one kernel; the table has better figures for it."""
    words = ["inspect", "--arch", "gfx942", "--kernel", "forward", "--head-dim", "64", "--mask", "full"]
    done = CliRunner().invoke(main, [*words, "--json", "--check"])
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    needed = "kernel arch head_dim dtype config registers spill_bytes shared_bytes mma tma bound"
    assert set(needed.split()) <= set(row)
    better = tmp_path / "resources.json"
    resource_table.write([row | {"bound": 0.99}], better)
    monkeypatch.setattr(resource_table.read_table, "__defaults__", (better,))
    monkeypatch.setattr(inspect_run, "inspect_jobs", lambda *jobs: (row for _ in range(1)))  # as compiled
    done = CliRunner().invoke(main, [*words, "--check"])
    assert done.exit_code == 1 and "before 0.990" in done.stderr and "v_mfma" in done.stdout


def test_measured_tiles_are_listed_checked_and_kept(monkeypatch, tmp_path) -> None:
    """A forward pass whose tiles waste nothing, and a dK/dV that spills: compiled, shown, and named."""
    folder = tmp_path / "configs"
    good, bad = Config(64, 64, 4, 2, False, True), Config(128, 128, 4, 2)
    entry_key = {"dtype": "bfloat16", "head_dim": 64, "mask": "interval"}
    entries = [
        entry_key | {"kernel": "forward", "config": asdict(good)},
        entry_key | {"kernel": "dkdv", "config": asdict(bad), "v_head_dim": 128, "score": "softcap"},
        entry_key | {"kernel": "few", "config": asdict(good), "mask": "full"},
        entry_key
        | {"kernel": "route", "config": {"ROUTE": "gluon", **asdict(Config(128, 64, 4, 2, False, True))}},
    ]
    device = tile_tables.Device("sm_90", "NVIDIA H200")
    tile_tables.write(folder, device, entries, {}, "3.7.1")
    jobs = resource_table.measured(["sm_80", "sm_90"], folder)
    named = ("forward", "documents"), ("forward", "state"), ("dkdv", "documents"), ("dkdv", "state")
    named += ("few", "few"), ("few", "decode"), ("gluon", "documents"), ("gluon", "state")
    assert [(job.kernel, job.variant) for job in jobs] == list(named)
    assert len({resource_table.key(job.identity) for job in [*LISTED, *jobs]}) == len(LISTED) + len(jobs)
    monkeypatch.setattr(resource_table.measured, "__defaults__", (resource_table.ARCHS, folder))
    compiled = [job for job in jobs if job.variant == "state" and job.kernel in ("dkdv", "gluon")]
    rows = {row["kernel"]: row for row in resource_table.inspect_jobs(compiled, 1, 300)}
    assert rows["gluon"]["config"] == asdict(Config(128, 64, 4, 2, False, True))
    assert resource_table.find_regressions(rows["gluon"], None) == [
        "not in the table: tritoncp inspect --update writes it"
    ]
    worse = rows["dkdv"]
    assert worse["spill_bytes"] > 0
    assert worse["source"] == "nvidia-h200-triton-3.7.1 dkdv interval 64x128 softcap"
    assert resource_table.find_regressions(worse, worse | {"spill_bytes": 0, "loop_spills": 0})
    table = tmp_path / "resources.json"
    resource_table.write([TABLE[0], *rows.values()], table)
    rows_on_disk = resource_table.read_table(table)
    assert len(rows_on_disk) == 3 and rows_on_disk[resource_table.key(worse)]["spill_bytes"]
    tile_tables.write(folder, device, [], {}, "3.7.1", [tile_tables.entry_key(entries[1])])
    resource_table.write([TABLE[0]], table)
    rest = resource_table.read_table(table)
    assert len(rest) == 2 and resource_table.key(worse) not in rest
    tile_tables.path_in(folder, tile_tables.Device("sm_90", "odd"), "3.7.1").write_text("{")
    with pytest.raises(ValueError, match=r"odd-triton.*is no file of tritoncp autotune"):
        resource_table.measured(["sm_90"], folder)


@pytest.mark.parametrize("words", [["--arch", "h100"], ["--mask", "nonsense"]])
def test_unknown_names_are_refused(words) -> None:
    assert CliRunner().invoke(main, ["inspect", *words]).exit_code != 0
