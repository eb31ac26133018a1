"""torch's templates of flex attention: the table of compiled candidates, its pages, and sentences about it."""

import json
import re
from pathlib import Path

import pytest

from tritoncp.analysis import resource_table
from tritoncp.analysis.templates import comparison, page, table
from tritoncp.analysis.templates.flex import MASKS, candidates, write_source
from tritoncp.analysis.throughput_bound import MACHINES, l2_bytes

ROOT = Path(__file__).parents[2]
ROWS = table.read_rows()
PLACES = comparison.comparisons()
RENEW = "python -m tritoncp.analysis.templates.page --update --write"


def test_the_table_has_every_candidate_that_torch_lists_and_no_other() -> None:
    assert table.is_current(), RENEW
    assert table.stale_templates(ROWS) == []
    keys = [table.key(row) for row in ROWS]
    assert len(set(keys)) == len(keys)
    without = [row for row in ROWS if row["source"] == "tritoncp"]
    jobs = table.stale_templates(without)
    assert len(jobs) == len(table.template_jobs())
    loops = sum(1 if job.template == "forward" else 2 for job in jobs)
    assert loops == len(ROWS) - len(without)
    for dim, tiles in ((64, 6), (128, 7), (256, 7)):
        listed = list(candidates("forward", "sm_90", dim, "causal", False))
        assert len(listed) == tiles and [job.default for job in listed] == [True] + [False] * (tiles - 1)


def test_the_table_has_tritoncps_rows_as_the_table_of_resources_has_them() -> None:
    assert table.stale_own(ROWS, resource_table.read_table()) == [], RENEW
    changed = [row | {"registers": 7} if row["kernel"] == "gluon" else row for row in ROWS]
    stale = table.stale_own(changed, resource_table.read_table())
    assert {job.kernel for job in stale} == {"gluon"}


def test_a_source_has_the_mask_and_the_tiles_of_its_job() -> None:
    for mask, code in (("causal", "(m) >= (n)"), ("documents", "arg_DOCUMENT"), ("full", "tl.full([1], True")):
        for template in ("forward", "backward"):
            job = next(candidates(template, "sm_90", 128, mask, True))
            text = write_source(job)
            compile(text, "flex", "exec")
            assert MASKS[mask].code.format(m="m", n="n") in text
            assert all(f"{name}: tl.constexpr = {size}" in text for name, size in job.constants.items())
            assert "USE_TMA: tl.constexpr = True" in text and "make_tensor_descriptor" in text


def test_the_cycles_of_the_l2_cache_are_those_of_the_tile() -> None:
    for row in ROWS:
        rows, columns = row["tile"]
        moved = l2_bytes(row["kernel"], rows, columns, row["head_dim"], row["head_dim"])
        assert row["cycles"]["l2"] == round(moved / MACHINES[row["arch"]].l2)
        assert row["bound"] <= row["cycles"]["tensor"] / max(row["cycles"].values()) + 0.002
    for row in (row for row in ROWS if row["kernel"] == "forward" and row["tile"][0] == 64):
        assert row["arch"] != "sm_90" or row["bound"] <= 0.61


def test_the_pages_hold_the_table() -> None:
    assert f"\n{page.format_summary()}\n" in page.NOTES.read_text(), RENEW
    assert f"\n{page.format_details()}\n" in page.PAGE.read_text(), RENEW
