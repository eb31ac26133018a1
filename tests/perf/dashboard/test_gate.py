"""Verdicts of `tritoncp perf compare` and their reasons, for programs and for comments."""

import csv
import json
from functools import partial

import pytest

from tests.perf.synthetic_history import H100, perf, write


@pytest.fixture
def side(tmp_path):
    """Write a history with a name, of cases from their times; return its path."""
    return lambda name, *series, **cases: write(tmp_path / f"{name}.jsonl", *series, **cases)


run_compare = partial(perf, "compare")


def judge(*words) -> tuple[int, dict]:
    result = run_compare(*words, "--json")
    facts = json.loads(result.stdout)
    assert facts["exit_code"] == result.exit_code
    return result.exit_code, facts


def test_a_verdict_has_a_reason_for_each_case(side):
    before = side("before", slow=[1.0, 1.01], broke=[1.0, 1.01], gone=[1.0], same=[1.0, 1.01])
    after = side("after", slow=[1.2, 1.21], broke=[1.0, None], same=[1.0, 1.01], new=[1.0])
    code, facts = judge(before, after, "--fail-over", "5")
    assert (code, facts["verdict"], facts["fail_over"]) == (1, "regression", 0.05)
    reasons = {reason["case"]: (reason["kind"], reason["text"]) for reason in facts["reasons"]}
    assert reasons["broke"] == ("failed", "fails, and did not before")
    assert reasons["gone"] == ("missing", "measured before and not after")
    kind, text = reasons["slow"]
    assert (
        kind == "slower" and text.startswith("19.") and text.endswith("5 % is allowed") and len(reasons) == 3
    )
    assert {row["case"]: row["verdict"] for row in facts["rows"]}["slow"] == "TOO SLOW"
    table = before.with_name("rows.csv")
    assert run_compare(before, after, "--fail-over", "5", "--csv", table).exit_code == 1
    rows = {row["case"]: row for row in csv.DictReader(table.read_text().splitlines())}
    assert float(rows["slow"]["ratio"]) == pytest.approx(1.2, abs=0.01) and rows["broke"]["ratio"] == ""
    comment = run_compare(before, after, "--fail-over", "5", "--markdown").stdout
    assert "- `gone`: measured before and not after" in comment.partition("<details")[0]
    code, facts = judge(before, before, "--fail-over", "5")
    assert (code, facts["verdict"], facts["reasons"]) == (0, "pass", [])


def test_required_cases_may_not_be_absent(side):
    before = side("before", **{"causal-fwd": [1.0], "full-fwd": [1.0], "plan": [1.0]})
    after = side("after", **{"causal-fwd": [None], "plan": [1.0], "new": [1.0]})
    words = (before, after, "--allow-missing")
    required = {
        "plan": [],
        "new": [],
        "full-*": [("missing", "full-fwd"), ("required", "full-*")],
        "causal-*": [("required", "causal-*")],
        "window-*": [("required", "window-*")],
    }
    for pattern, reasons in required.items():
        code, facts = judge(*words, "--require", pattern)
        assert code == 1, "causal-fwd fails"
        found = [(reason["kind"], reason["case"]) for reason in facts["reasons"]]
        assert found == [("failed", "causal-fwd"), *reasons], pattern
    result = run_compare(before, side("fine", plan=[1.0]), "--allow-missing", "--require", "window-*")
    assert result.exit_code == 1 and "window-*: required, and no such case has a time after" in result.stdout


def test_a_first_run_on_a_device_is_compared_with_nothing(side):
    empty, h200, h100 = side("empty"), side("h200", c=[1.0]), side("h100", H100, c=[9.0])
    assert (
        run_compare(empty, h200).exit_code == 3 and run_compare(h200, h100, "--fail-over", "5").exit_code == 1
    )
    for before, present in ((empty, "no device"), (h100, str(H100))):
        code, facts = judge(before, h200, "--allow-new-device", "--fail-over", "5")
        assert (code, facts["verdict"], facts["reasons"]) == (0, "first run", [])
        text = run_compare(before, h200, "--allow-new-device", "--markdown").stdout
        assert "first measurements on NVIDIA H200" in text and f"the history has {present}" in text
    code, facts = judge(empty, h200, "--allow-new-device", "--require", "d")
    assert code == 1 and [reason["kind"] for reason in facts["reasons"]] == ["required"]
    assert "- `d`" in run_compare(empty, h200, "--allow-new-device", "--require", "d", "--markdown").stdout
    slow = side("slow", c=[2.0])
    assert judge(h200, slow, "--allow-new-device", "--fail-over", "5")[0] == 1
    empty.write_text("{}\n")
    assert run_compare(empty, h200, "--allow-new-device").exit_code == 2, "broken lines are no first run"


def test_a_comment_is_shortened_to_githubs_limit(side):
    cases = {f"case-{i}-{'x' * 80}": [1.0] for i in range(900)}
    before, after = side("before", **cases), side("after", **{name: [2.0] for name in cases})
    comment = run_compare(before, after, "--fail-over", "5", "--markdown").stdout
    assert len(comment) < 65536 and " …\n" in comment and comment.endswith("</details>\n")
    gone = run_compare(before, side("one", other=[1.0], **dict([next(iter(cases.items()))])), "--markdown")
    assert len(gone.stdout) < 65536 and gone.stdout.endswith("</details>\n")
