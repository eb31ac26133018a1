"""`tritoncp inspect`: the shipped table of compiled kernels, and the regressions that it reports."""

import json
from dataclasses import asdict

import pytest

from tests.command_process import ROOT, invoke
from tritoncp.analysis import resource_table
from tritoncp.core.versions import minor_of
from tritoncp.kernels.tile_rules import Config
from tritoncp.measured_tiles import tile_tables

UNITS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
FIGURES = resource_table.read_table()
LISTED = [*resource_table.shipped(), *resource_table.measured()]
TABLE = [job.fields | FIGURES[job.name] for job in LISTED]
PASSES = [
    row for row in TABLE if row["kernel"] not in ("delta", "combine", "sums") and row["dtype"] != "float32"
]
SELECTED = ("tokens", "group_tokens", "blocks")
SPILLING = {"dkdv sm_80 128 bfloat16 causal": 8}


def test_the_table_has_a_row_for_each_shipped_kernel_and_no_other() -> None:
    assert [*FIGURES] == [job.name for job in LISTED]


def test_the_table_was_made_from_the_kernels_and_tiles_that_are_here(tmp_path) -> None:
    """Remedy for a failure: run ``tritoncp inspect --update`` and commit the table."""
    origin = json.loads(resource_table.TABLE.read_text())["origin"]
    assert origin["kernels"] == resource_table.origin()["kernels"]
    assert f"triton=={origin['triton']}\n" in (ROOT / "constraints.txt").read_text()
    path, here = tmp_path / "resources.json", resource_table.origin()
    for rows, origin in ((TABLE[1:], {}), (TABLE, here), (TABLE[:1], here), (TABLE[1:], here)):
        resource_table.write(rows, path)
        assert json.loads(path.read_text())["origin"] == origin
    path.write_text(path.read_text().replace(here["kernels"], "other"))
    resource_table.write(TABLE[1:], path)
    assert json.loads(path.read_text())["origin"] == {}


def test_shipped_kernels_spill_nothing_fit_and_use_matrix_units() -> None:
    """One kernel spills two registers, which each masked tile reads. The tile that spills none (64 × 64)
    executes 28 % more wavefronts and 67 % more sectors."""
    for row in TABLE:
        assert row["shared_bytes"] <= resource_table.SHARED_BYTES[row["arch"]], row["name"]
        assert row["spill_bytes"] <= SPILLING.get(row["name"], 0), row["name"]
    for row in PASSES:
        few = row["variant"] in SELECTED and row["matrix"] == "HMMA"  # tiles of fewer than 64 rows
        assert few or row["matrix"] == UNITS[row["arch"]], row["name"]


def test_tiles_of_64_rows_of_selected_keys_use_the_unit_of_the_gpu() -> None:
    tokens = [row for row in PASSES if row["variant"] == "tokens" and row["kernel"] != "dkdv"]
    tokens = [row for row in tokens if row["head_dim"] <= 256]  # above, tiles have 32 rows
    assert {row["matrix"] for row in tokens} == {"HMMA", "HGMMA", "UTCHMMA"}
    assert all(row["matrix"] == UNITS[row["arch"]] for row in tokens)


def test_kernels_copy_by_descriptor_if_they_can() -> None:
    for row in TABLE:
        assert row["tma"] == 0 or (row["arch"] in ("sm_90", "sm_100") and row["variant"] != "pointers")


def test_regressions_are_named() -> None:
    was = next(row for row in PASSES if row["arch"] == "sm_90" and row["tma"])
    assert resource_table.find_regressions(was, was) == []
    for change, said in (
        ({"spill_bytes": 8}, "8 spilled bytes, before 0"),
        ({"shared_bytes": 300_000}, "300000 bytes of shared memory, more than the limit 232448"),
        ({"tensor_columns": 608}, "608 columns of tensor memory, more than 512"),
        ({"matrix": "HMMA"}, "by HMMA, before by HGMMA"),
        ({"failed": "it broke"}, "it broke"),
        ({"tma": 0}, "no TMA any more"),
    ):
        (line,) = resource_table.find_regressions(was | change, was)
        assert said in line
    assert resource_table.find_regressions(was, None) == [
        "not in the table: tritoncp inspect --update writes it"
    ]


def test_writing_rows_keeps_all_other_rows(tmp_path) -> None:
    path = tmp_path / "configs/resources.json"
    resource_table.write(TABLE[:3], path)
    resource_table.write([TABLE[1] | {"registers": 7}], path)
    (one, figures), (two, others), (three, last) = list(FIGURES.items())[:3]
    expected = {one: figures, two: others | {"registers": 7}, three: last}
    assert list(resource_table.read_table(path).items()) == list(expected.items())


def test_spills_of_other_versions_of_triton_are_of_shipped_kernels_and_stay(tmp_path) -> None:
    table = json.loads(resource_table.TABLE.read_text())
    for version, spills in table["spills"].items():
        assert minor_of(version) != minor_of(table["origin"]["triton"])
        own = resource_table.read_table(triton=version + ".7")
        differ = {name: row["spill_bytes"] for name, row in own.items() if row != FIGURES[name]}
        assert differ == spills
    path = tmp_path / "resources.json"
    path.write_text(resource_table.TABLE.read_text())
    resource_table.write(TABLE, path)
    assert json.loads(path.read_text())["spills"] == table["spills"]


@pytest.mark.long
def test_check_reports_a_regression(monkeypatch, tmp_path) -> None:
    """Compile one kernel; the table has another matrix unit for it."""
    words = ["inspect", "--arch", "gfx942", "--kernel", "forward", "--head-dim", "64", "--mask", "full"]
    done = invoke(*words, "--json", "--check")
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert {"registers", "spill_bytes", "shared_bytes", "matrix", "tma", "config"} <= set(row)
    other = tmp_path / "resources.json"
    resource_table.write([row | {"matrix": "v_wmma"}], other)
    monkeypatch.setattr(resource_table.read_table, "__defaults__", (other, ""))
    monkeypatch.setattr(resource_table, "inspect_jobs", lambda *jobs: (row for _ in range(1)))  # as compiled
    done = invoke(*words, "--check")
    assert done.exit_code == 1 and "before by v_wmma" in done.stderr and "v_mfma" in done.stdout


@pytest.mark.long
def test_measured_tiles_are_listed_checked_and_kept(monkeypatch, tmp_path) -> None:
    """Tiles of every kind, including a dK/dV that spills, are compiled, written, and dropped when they are
    not shipped any more."""
    folder = tmp_path / "configs"
    good, bad = Config(64, 64, 4, 2, USE_TMA=True), Config(128, 128, 4, 2)
    entry_key = {"dtype": "bfloat16", "head_dim": 64, "mask": "interval"}
    entries = [
        entry_key | {"kernel": "forward", "config": asdict(good)},
        entry_key | {"kernel": "dkdv", "config": asdict(bad), "v_head_dim": 128, "score": "softcap"},
        entry_key | {"kernel": "few", "config": asdict(good), "mask": "full"},
        entry_key
        | {"kernel": "route", "config": {"ROUTE": "gluon", **asdict(Config(128, 64, 4, 2, USE_TMA=True))}},
    ]
    device = tile_tables.Device("sm_90", "NVIDIA H200")
    tile_tables.write(folder, device, entries, {}, "3.7.1")
    jobs = resource_table.measured(["sm_80", "sm_90"], folder)
    named = ("forward", "documents"), ("forward", "state"), ("dkdv", "documents"), ("dkdv", "state")
    named += ("few", "few"), ("few", "decode"), ("gluon", "documents"), ("gluon", "state")
    assert [(job.kernel, job.variant) for job in jobs] == list(named)
    assert len({job.name for job in [*LISTED, *jobs]}) == len(LISTED) + len(jobs)
    monkeypatch.setattr(resource_table.measured, "__defaults__", (resource_table.ARCHS, folder))
    compiled = [job for job in jobs if job.variant == "state" and job.kernel in ("dkdv", "gluon")]
    rows = {row["kernel"]: row for row in resource_table.inspect_jobs(compiled, 1, 300)}
    assert rows["gluon"]["config"] == asdict(Config(128, 64, 4, 2, USE_TMA=True))
    worse = rows["dkdv"]
    assert worse["spill_bytes"] > 0
    assert worse["source"] == "nvidia-h200-triton-3.7.1 dkdv interval 64x128 softcap"
    assert resource_table.find_regressions(worse, worse | {"spill_bytes": 0})
    table = tmp_path / "resources.json"
    resource_table.write([TABLE[0], *rows.values()], table)
    assert worse["name"] in resource_table.read_table(table)
    tile_tables.path_in(folder, device, "3.7.1").unlink()
    tile_tables.write(folder, device, [entry for entry in entries if entry["kernel"] != "dkdv"], {}, "3.7.1")
    resource_table.write([TABLE[0]], table)
    assert len(resource_table.read_table(table)) == 2
    tile_tables.path_in(folder, tile_tables.Device("sm_90", "odd"), "3.7.1").write_text("{")
    with pytest.raises(ValueError, match=r"odd-triton.*is not a file of tritoncp autotune"):
        resource_table.measured(["sm_90"], folder)
