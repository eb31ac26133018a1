"""Runs that end early and are resumed from their journal, and journals with malformed lines."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.tuning.stand_ins import BEST, TARGET, Compiler, Formula, cost, tuner
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.search import MAX_TIMED


def run(path, resume=False):
    """Run the search, and close its journal. Returns its choice, the compiler and the device."""
    compiler, device = Compiler(), Formula(cost)
    search = tuner(path, compiler, resume)
    choice = search.run([TARGET], device)[TARGET]
    search.journal.close()
    return choice, compiler, device


@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_a_run_that_ends_anywhere_is_resumed(tmp_path, part):
    """For a journal that ends in any line, a resumed run repeats no finding, and makes the choice of an
    undisturbed run."""
    path = tmp_path / "journal.jsonl"
    choice, whole, device = run(tmp_path)
    lines = path.read_text().splitlines()
    kept = [json.loads(line) for line in lines[: int(part * len(lines))]]
    path.write_text("\n".join([*map(json.dumps, kept), lines[-1][:9]]))
    stages = Counter(line["finding"][0] for line in kept[1:])
    resumed, rest, second_device = run(tmp_path, resume=True)
    assert resumed.config == choice.config == BEST
    assert len(rest.asked) == len(whole.asked) - stages["compile"]
    assert len(rest.steps) == len(whole.steps) - stages["compile"]
    assert len(second_device.checks) == len(device.checks) - stages["check"]
    left = 0 if part == 1 else len(device.samples)  # a halving that was not over is repeated
    assert len(second_device.samples) <= left


def test_two_runs_do_not_write_to_one_journal(tmp_path):
    first = tuner(tmp_path)
    with pytest.raises(RuntimeError, match=r"another tritoncp autotune writes to .*journal.jsonl.*--out"):
        tuner(tmp_path)
    first.journal.close()
    tuner(tmp_path)


@pytest.mark.parametrize("line", ["17", '{"finding": ', "[" * 100_000, "\udcff", ""])
def test_a_malformed_line_loses_only_that_line(tmp_path, line):
    """The malformed line replaces the finding about the first candidate, or is an incomplete last line."""
    path = tmp_path / "journal.jsonl"
    run(tmp_path)
    first, _, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest, line]), errors="surrogateescape")
    choice, compiler, _ = run(tmp_path, resume=True)
    assert choice.config == BEST and len(compiler.asked) == 1


@pytest.mark.parametrize("other", ["conditions", "no resume"])
def test_findings_of_other_conditions_or_an_older_run_are_not_taken_over(tmp_path, other):
    run(tmp_path)
    compiler = Compiler()
    search = tuner(tmp_path, compiler)
    if other == "conditions":
        search.journal.close()
        search.journal = TuningJournal(tmp_path / "journal.jsonl", {"device": "another"}, resume=True)
    search.select(TARGET, 1e9)
    assert len(compiler.asked) == MAX_TIMED
