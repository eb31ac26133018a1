"""The simulated start order of programs: `tritoncp inspect --order`."""

import json
from itertools import permutations, product

import pytest
from click.testing import CliRunner

from tritoncp.analysis.program_order import estimates, least_makespan, makespan
from tritoncp.cli import main

LIMIT = 1.04  # of the least time of any order
# 133.3 units for each of 132 places: the longest programs first end at 141, the best assignment known at 136.
WORSE = {("prefix-8k", "dkdv"): 1.06}


def test_shipped_launches_end_within_four_percent_of_the_best_order() -> None:
    rows = list(estimates("sm_90"))
    assert len({row.step for row in rows}) > 40 and {row.kernel for row in rows} == {"forward", "dq", "dkdv"}
    for row in rows:
        if "-4k" not in row.step:
            assert row.by_section <= WORSE.get((row.step, row.kernel), LIMIT), row
    assert sum(row.by_head > LIMIT for row in rows) > 40  # the order matters


@pytest.mark.parametrize("durations", [(3, 1, 2), (5, 5, 5, 1, 1), (4, 0, 0, 4, 3, 3), (2, 2, 2, 2, 2)])
def test_no_order_undercuts_the_least_makespan(durations: tuple[int, ...]) -> None:
    for places, order in product((1, 2, 3), set(permutations(durations))):
        assert makespan(order, places) >= least_makespan(durations, places) >= max(durations)


def test_the_command_prints_a_table_and_json() -> None:
    result = CliRunner().invoke(main, ["inspect", "--order"])
    assert result.exit_code == 0 and "document-8k" in result.output and "a hop" in result.output
    rows = json.loads(CliRunner().invoke(main, ["inspect", "--order", "--arch", "sm_80", "--json"]).stdout)
    assert {"arch", "step", "kernel", "programs", "by_head", "by_section"} == rows[0].keys()
    assert {row["arch"] for row in rows} == {"sm_80"}
    refused = CliRunner().invoke(main, ["inspect", "--order", "--kernel", "dq"])
    assert refused.exit_code == 2 and "compiles nothing" in refused.output
