"""torch's templates of flex attention: the table of compiled candidates, its pages, sentences about it."""

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
    for mask in MASKS:
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


def notes_of_reasons() -> dict[tuple[str, int, str], str]:
    """Read the list of reasons in the notes: (kernel, head dim, GPU) -> text."""
    section = page.NOTES.read_text().partition("is behind one of torch's:\n")[2].partition("\n## ")[0]
    items = [" ".join(item.split()) for item in section.split("\n- ")]
    names = re.compile(r"\*\*(\w+), (\d+) channels, (sm_\d+)\*\*")
    return {(kernel, int(dim), arch): item for item in items for kernel, dim, arch in names.findall(item)}


def test_the_notes_give_a_reason_for_each_bound_that_is_behind() -> None:
    behind: dict[tuple[str, int, str], list[dict]] = {}
    for (kernel, arch, dim, _), place in PLACES.items():
        if kernel in table.KERNELS:
            rivals = [
                row for row in (place.default, place.best) if comparison.verdict(place.own, row) == "behind"
            ]
            behind.setdefault((kernel, dim, arch), []).extend(rivals)
    reasons = notes_of_reasons()
    assert set(reasons) == {key for key, rows in behind.items() if rows}
    for key, text in reasons.items():
        rows = behind[key]
        assert "*serial*" not in text or all(map(comparison.is_serial, rows)), key
        assert "*spills*" not in text or all(row["spill_bytes"] for row in rows), key
        assert "an artefact" not in text or "*serial*" in text, key
        tiles = {"×".join(map(str, row["tile"])) for row in rows}
        assert all(f"{tile}," in text or f"{tile})" in text for tile in tiles if "real" not in text), key


def test_no_sentence_counts_what_is_ahead_or_behind_but_the_written_ones() -> None:
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("perf/*.md"),
    ]:
        text = path.read_text()
        rest = re.sub(f"{page.BEGIN}.*?{page.END}", "", text, flags=re.DOTALL)
        counts = re.findall(
            r"\b\d+ (?:of \d+ )?(?:rows |bounds |kernels )?(?:are |is )?(?:ahead|behind)\b", rest
        )
        assert counts == [], path


def test_a_verdict_is_of_bounds_and_a_serial_loop_of_its_products() -> None:
    row = {"bound": 0.5, "kernel": "forward"}
    assert [comparison.verdict({"bound": x}, row) for x in (0.511, 0.51, 0.49, 0.489)] == [
        *("ahead", "equal", "equal", "behind")
    ]
    assert [comparison.is_serial(row | {"serial": count}) for count in (2, 3)] == [False, True]
    own = [row for row in ROWS if row["source"] == "tritoncp"]
    assert own and not any(map(comparison.is_serial, own))


def test_the_best_candidate_fits_and_is_one_of_torchs() -> None:
    assert {kernel for kernel, *_ in PLACES} == set(page.COMPARED)
    for place in PLACES.values():
        assert place.own["source"] == "tritoncp" and place.best["source"] == "torch"
        assert comparison.fits(place.best) and place.default["default"] and not place.default["tma"]
        assert place.best["bound"] >= place.default["bound"] or not comparison.fits(place.default)


@pytest.mark.parametrize("missing", [1, 5])
def test_rows_are_written_as_they_are_read(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "templates.json"
    table.write_rows(ROWS[missing:], path)
    assert table.read_rows(path) == ROWS[missing:] and table.is_current(path)
    table.write_rows([*ROWS[missing:], *ROWS], path)
    assert path.read_text() == table.TABLE.read_text()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"toolchain": {}}))
    assert not table.is_current(path)
