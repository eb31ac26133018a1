"""Tests of the text of `print(plan)`."""

import json
import re
from dataclasses import replace

import pytest

from tests.planning.report.test_rasters import document_plan
from tritoncp.planning.report.facts import Facts, owner_shares
from tritoncp.planning.report.text import WIDTH, format_blocks, format_lines, format_meaning
from tritoncp.planning.report.units import format_bytes


def plan(size=1024, world_size=4, balancer="ptrr"):
    return document_plan(size, world_size, balancer).for_rank(world_size - 1)


@pytest.mark.parametrize("balancer", ["ptrr", "head_tail", "contiguous"])
def test_every_block_is_labelled_with_its_owner(balancer):
    drawn = plan(balancer=balancer)
    lines = str(drawn).split("\n\n")[1].splitlines()[1:]
    assert [line.rank for line in format_blocks(drawn)[1:]] == drawn.owners[0].tolist()
    assert [int(line.split()[0]) for line in lines] == drawn.owners[0].tolist()
    assert [line.split()[1] for line in lines] == drawn.mask.draw().splitlines()


def test_work_and_imbalance_are_the_plans():
    drawn = plan()
    (work,) = [part for part in str(drawn).split("\n\n") if part.startswith("work:")]
    title, *bars = work.splitlines()
    assert f"max/mean {drawn.imbalance:.3f}" in title
    assert [float(bar.split()[-1]) for bar in bars] == drawn.work
    assert max(bar.count("█") for bar in bars) == 32


def test_costs_and_bytes_are_the_plans():
    drawn = plan(8192)
    facts = Facts.of(drawn, batch=2, heads=8, kv_heads=4, head_dim=64, v_head_dim=32, itemsize=4)
    layer = {"batch": 2, "heads": 8, "kv_heads": 4, "head_dim": 64, "v_head_dim": 32, "itemsize": 4}
    assert {estimate.schedule for estimate in facts.costs} == {"allgather", "ring", "fetch", "ulysses"}
    for schedule, sent in facts.bytes_sent.items():
        views = [replace(drawn, schedule=schedule).for_rank(rank) for rank in range(4)]
        assert sent == [view.bytes_sent(**layer) for view in views]
    assert int(facts.reads.sum() - facts.reads.trace()) == sum(
        replace(drawn, schedule="fetch").for_rank(rank).bytes_sent(**layer, backward=False)
        for rank in range(4)
    )
    said = "\n".join(line.text for line in format_lines(facts))
    for estimate in facts.costs:
        (line,) = [line for line in said.splitlines() if line[2:].startswith(estimate.schedule)]
        assert f"{estimate.forward * 1e3:.3f}" in line and line.startswith("→") == (
            estimate.schedule == drawn.schedule
        )
    rows = drawn.s_local * 2
    want = rows * 8 * (64 * 4 + 32 * 4 + 4) + rows * 4 * (64 + 32) * 4
    assert facts.shard_bytes == want and f"lse) {want / 2**20:.1f};" in said
    assert json.loads(json.dumps(facts.as_json()))["work"] == drawn.work


def test_a_long_plan_fits_a_screen():
    lines = str(plan(size=128 * 200, world_size=64)).splitlines()
    assert len(lines) <= WIDTH + 24
    assert all(len(line) <= 2 * WIDTH for line in lines[1:])


@pytest.mark.parametrize("balancer", ["ptrr", "head_tail", "contiguous"])
@pytest.mark.parametrize("world_size", [3, 64])
def test_strips_show_the_queries_of_each_rank(balancer, world_size):
    drawn = plan(size=128 * 64, world_size=world_size, balancer=balancer)
    shares = owner_shares(drawn, 64, 64)
    assert shares.argmax(0).tolist() == drawn.owners[0].tolist() and shares.sum() == 64
    (strips,) = [part for part in str(drawn).split("\n\n") if part.startswith("whose queries")]
    places = re.findall(r"(\d+)  ([█▒·]+)", strips)
    assert sorted(int(rank) for rank, _ in places) == list(range(world_size))
    for rank, strip in places:
        own = drawn.owners[0].view(len(strip), -1) == int(rank)
        assert [char != "·" for char in strip] == own.any(1).tolist()


def test_plain_words_have_the_figures_of_the_plan():
    drawn = plan(size=8192, balancer="contiguous")
    facts = Facts.of(drawn)
    who, even, travels, how = format_meaning(facts)
    assert "each of the 4 ranks" in who and "2K tokens" in who and who.endswith("at 0-2K.")
    wait = 100 * (1 - 1 / drawn.imbalance)
    assert drawn.imbalance > 1.1 and "even: no" in even and f"wait {wait:.2g} %" in even
    assert f"{100 * facts.metrics['remote_share']:.3g} % of the keys" in travels
    sent = max(facts.bytes_sent[drawn.schedule])  # the number in the table of schedules
    assert drawn.schedule in how and f"at most {format_bytes(sent)} sent by a rank" in how
    words = " ".join(str(drawn).split())
    assert all(line in words for line in (who, even, travels, how))
    assert "even: yes" in format_meaning(Facts.of(plan(8192, balancer="ptrr")))[1]
    assert "nothing" in format_meaning(Facts.of(plan(world_size=1)))[1]


def test_a_world_of_one_is_drawn():
    assert str(plan(world_size=1)).startswith("Plan: 1024 queries × 1024 keys, blocks of 128 × 128; 1 rank;")
