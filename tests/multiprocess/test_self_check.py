"""`tritoncp check` on real ranks over gloo: forked with the environment of torchrun, and under torchrun."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.multiprocess.ranks import Outcome, leave_for_torchrun, outcomes
from tests.test_self_check import SCHEDULES, expected_cases, name
from tritoncp.cli import main
from tritoncp.kernels.engine import TritonEngine
from tritoncp.self_check import cases

pytestmark = pytest.mark.long
TIMEOUT = 4.0  # seconds that a rank waits for another


class End(NamedTuple):
    """The exit status and stdout of the check on each rank."""

    ranks: list[Outcome]
    stdout: list[str]

    @property
    def codes(self) -> list[int | None]:
        return [rank.status for rank in self.ranks]


def check(
    folder: Path,
    world_size: int,
    *options: str,
    plant: Callable[[int], None] = lambda rank: None,
    faulty: int = -1,
) -> End:
    """Run the command on every rank. ``plant`` puts a fault into a rank."""

    def run(group: Any) -> None:
        rank = group.rank()
        leave_for_torchrun(group)
        os.environ["TORCHELASTIC_RUN_ID"] = "a test"
        signal.alarm(0)
        sys.stdout = (folder / f"stdout {rank}").open("w")
        plant(rank)
        try:
            main(["check", "--budget=600", f"--timeout={TIMEOUT}", *options], prog_name="tritoncp")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(int(end.code or 0))

    ends = outcomes(world_size, run, 60, 100, faulty)  # a rank that has not ended by then has no status
    return End(ends, [(folder / f"stdout {rank}").read_text() for rank in range(world_size)])


def test_two_ranks_are_right_in_every_case(tmp_path: Path) -> None:
    end = check(tmp_path, 2, "--json")
    assert end.codes == [0, 0], end
    assert end.stdout[1] == "", "only the first rank speaks"
    report = json.loads(end.stdout[0])
    assert report["right"] and all(case["right"] for case in report["cases"])
    assert sorted(map(name, report["cases"])) == expected_cases(SCHEDULES[:-1])
    summed = [case for case in report["cases"] if case["tensor"] in ("dbias", "dsinks")]
    assert all((case["rank"] is None) == (case["schedule"] != "one-device") for case in summed)
    assert {"rank 0", "rank 1"} <= report["facts"]["check"].keys()


def test_four_ranks_trade_heads_and_pass_keys_around(tmp_path: Path) -> None:
    end = check(tmp_path, 4, "--json", "--only=*-documents-float32")
    assert end.codes == [0] * 4, end
    cases = json.loads(end.stdout[0])["cases"]
    assert [case["schedule"] for case in cases] == [*SCHEDULES]


def test_three_ranks_share_lengths_and_heads_that_do_not_divide(tmp_path: Path) -> None:
    end = check(tmp_path, 3, "--only=[fu]*-score_mod-float32")
    assert end.codes == [0] * 3, end
    assert "2 of 2 cases are right" in end.stdout[0]


def in_forward(rank: int, number: int, fault: Callable[[], None]) -> Callable[[int], None]:
    """A fault of one rank in the n-th step of a forward pass."""
    steps = itertools.count(1)
    forward = TritonEngine.forward

    def launch(self: Any, *tensors: Any, **step: Any) -> Any:
        if next(steps) == number:
            fault()
        return forward(self, *tensors, **step)

    def plant(own: int) -> None:
        if own == rank:
            TritonEngine.forward = launch  # type: ignore[method-assign]

    return plant


def test_a_wrong_rank_is_named(tmp_path: Path) -> None:
    def plant(rank: int) -> None:
        attend = cases.flex_attention

        def off(q: Any, *rest: Any, **options: Any) -> Any:
            return attend(q * (1.1 if rank == 1 else 1), *rest, **options)

        cases.flex_attention = off  # type: ignore[assignment]

    end = check(tmp_path, 3, "--json", "--only=fetch-window-float32", plant=plant)
    assert end.codes == [1, 1, 1], end
    (case,) = json.loads(end.stdout[0])["cases"]
    assert not case["right"] and 1 in case["ranks"]


@pytest.mark.parametrize("fault", ["dies", "stalls"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_named_and_the_other_ranks_end_in_time(fault: str, lost: int, tmp_path: Path) -> None:
    def fail() -> None:
        if fault == "dies":
            os._exit(7)
        time.sleep(300)

    end = check(tmp_path, 3, "--only=*-causal-float32", plant=in_forward(lost, 4, fail), faulty=lost)
    remaining = [rank for rank in range(3) if rank != lost]
    assert [end.codes[rank] for rank in remaining] == [1, 1], end
    output = end.stdout[remaining[0]]
    lines = [" ".join(line.split()[1:]) for line in output.splitlines()]
    assert any(line.startswith("right one-device causal float32") for line in lines), "done before"
    running = next(line for line in lines if line.startswith("FAILED"))
    store_is_lost = fault == "dies" and lost == 0  # rank 0 keeps it
    said = "(rank 0, or torchrun) has probably died" if store_is_lost else f"rank {lost} did not come"
    assert said in running
    assert f"float32 ran: rank {lost}\n" in output, output
    assert not any(f"on rank {lost}" in line for line in lines if line.startswith("FAILED"))


def test_all_ranks_report_an_exception_of_one_rank(tmp_path: Path) -> None:
    def fail() -> None:
        raise ArithmeticError("of rank 1 alone")

    end = check(tmp_path, 2, "--json", "--only=*-causal-float32", plant=in_forward(1, 2, fail))
    assert end.codes == [1, 1], end
    report = json.loads(end.stdout[0])
    failed = next(case for case in report["cases"] if not case["right"])
    assert failed["rank"] == 1 and failed["why"].startswith("rank 1: ArithmeticError: of rank 1 alone")
    assert report["stopped"].startswith("allgather-causal-float32 failed, and ")
