"""Plans as text, JSON and pictures, and `tritoncp plan`: each shows the figures of the plan."""

import html
import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image

import tritoncp
from tests.command_process import invoke
from tritoncp import Plan, and_masks, causal, create_block_mask, document, full_mask, sliding_window
from tritoncp.core.records import replace
from tritoncp.planning.build import build
from tritoncp.planning.costs.hardware import Hardware
from tritoncp.planning.placement import by_blocks
from tritoncp.report import drawing
from tritoncp.report.command import check_size
from tritoncp.report.facts import PlanFacts
from tritoncp.report.text import (
    WIDTH,
    format_blocks,
    format_heading,
    format_meaning,
    format_text,
    format_work,
)

LAYER = {"batch": 2, "heads": 8, "kv_heads": 4, "head_dim": 64, "v_head_dim": 32, "itemsize": 4}


def document_plan(size: int, world_size: int, balancer: str = "ptrr", block: int = 128) -> Plan:
    """Build the plan of a causal mask of two documents, the first a quarter of the tokens."""
    mod = and_masks(causal(), document(lengths=[size // 4, size - size // 4]))
    mask = create_block_mask(mod, 1, 1, size, size, BLOCK_SIZE=block)
    return build(mask, world_size, world_size - 1, balancer=balancer)


PLANS = {
    "documents": document_plan(4096, 4),
    "one rank": document_plan(1024, 1),
    "one block": document_plan(128, 2),  # one rank has it, and the other schedules cost next to nothing
    "many ranks": build(create_block_mask(sliding_window(512), 1, 1, 1 << 14, 1 << 14), 40),
    "several heads": build(full_mask(1000, 300, B=2, H=3, block=(64, 32)), 3),
    "balancer compared": document_plan(4096, 4, "auto"),  # the longest reason
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("documents", "one rank", "one block")))
        for name in PLANS
    ],
)
def test_text_and_picture_have_the_figures_of_the_plan(name: str, tmp_path: Path) -> None:
    plan: Plan = PLANS[name]
    figure = plan.plot(tmp_path / "new" / "folder" / "plan.png")
    assert Image.open(tmp_path / "new" / "folder" / "plan.png").size == (1500, 1220)
    assert figure._repr_png_()[:4] == b"\x89PNG", "a notebook shows it"
    for text in [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]:
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= 1500 and 0 <= box.y0 <= box.y1 <= 1220, text
    axes = {axes.get_title("left"): axes for axes in figure.axes}
    bars = axes["Work of each rank"].patches
    assert [bar.get_height() for bar in bars] == plan.work
    assert [math.floor(bar.get_center()[0]) for bar in bars] == list(range(plan.world_size))
    images = axes["Whose keys each rank reads"].images
    remote, own = (torch.as_tensor(image.get_array().filled(-1)) for image in images)
    owners = [label.get_text() for label in axes["Work of each rank"].get_xticklabels()]
    assert owners == list(map(str, range(0, plan.world_size, -(-plan.world_size // 16))))
    ticks = axes["Who computes what"].get_xticks()
    assert (ticks[0], ticks[-1]) == (0, plan.mask.kv_len) and all(a <= b for a, b in pairwise(ticks))
    rows = PlanFacts.of(plan).reads.double().fill_diagonal_(0)
    assert torch.equal(remote, torch.where(rows > 0, rows, -1)) and own.add(1).equal(torch.eye(len(own)))
    plan.plot(tmp_path / "plan.svg", heads=16, kv_heads=4)
    drawn = html.unescape(re.sub("<[^>]*>", " ", (tmp_path / "plan.svg").read_text()))
    for text, facts in ((drawn, PlanFacts.of(plan, heads=16, kv_heads=4)), (str(plan), PlanFacts.of(plan))):
        parts = [format_heading(plan), plan.reason, f"{plan.imbalance:.3f}", *format_meaning(facts)]
        schedules = [*(one.schedule for one in facts.costs), f"→ {plan.schedule}"]
        parts += schedules if plan.world_size > 1 else ["one rank: nothing is sent"]
        assert [part for part in parts if part not in " ".join(text.split())] == []


def test_the_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        PLANS["documents"].plot()


@pytest.mark.parametrize("balancer", ["ptrr", "head_tail", "contiguous"])
@pytest.mark.parametrize("block", [4096, 128, 16])  # one block, a block a pixel, and 8 x 8
def test_a_pixel_has_the_owners_colour_and_the_share_of_its_blocks(balancer: str, block: int) -> None:
    plan, side = document_plan(4096, 4, balancer, block), min(32, 4096 // block)
    pixels, paint = drawing.mask_pixels(plan, 32), drawing.colours(4)
    opacity = torch.tensor([drawing.MASKED, 1, 1, 0.0])[plan.mask.runs.to_kinds()[0, 0].long()]
    share = opacity.view(side, 4096 // block // side, side, -1).mean((1, 3))
    torch.testing.assert_close(pixels[..., 3], torch.where(share > 0, share.clamp(min=drawing.SOME), 0))
    colour = paint[plan.owners[0]].view(side, -1, 3).mean(1)[:, None].expand(-1, side, -1)
    torch.testing.assert_close(pixels[..., :3], colour)


@pytest.mark.sample(4)
@pytest.mark.parametrize("balancer", ["ptrr", "head_tail", "contiguous"])
@pytest.mark.parametrize("world_size", [3, 64])
def test_owners_are_shown_in_text(balancer: str, world_size: int) -> None:
    plan = document_plan(128 * 64, world_size, balancer)
    owners = plan.owners[0]
    _, blocks, work, *_ = str(plan).split("\n\n")
    if world_size == 3:  # a line for each block
        pairs = zip(owners.tolist(), plan.mask.draw().split("\n"))
        assert [line.split() for line in blocks.splitlines()[1:]] == [[str(o), row] for o, row in pairs]
        assert [float(bar.split()[-1]) for bar in work.splitlines()[1:]] == plan.work
    assert all(len(line) <= 2 * WIDTH for line in str(plan).splitlines()[1:])


def test_costs_and_bytes_are_the_plans() -> None:
    plan = document_plan(8192, 4, "contiguous")
    facts = PlanFacts.of(plan, **LAYER)
    for schedule, sent in facts.bytes_sent.items():
        views = [replace(plan, schedule=schedule).for_rank(rank) for rank in range(4)]
        assert sent == [view.bytes_sent(**LAYER) for view in views]
    views = [replace(plan, schedule="fetch").for_rank(rank) for rank in range(4)]
    fetched = sum(view.bytes_sent(**LAYER, backward=False) for view in views)
    assert int(facts.reads.sum() - facts.reads.trace()) == fetched
    lines = plan.explain(**LAYER).splitlines()
    for estimate in facts.costs:
        (line,) = [line for line in lines if line[2:].startswith(estimate.schedule)]
        assert f"{estimate.forward * 1e3:.3f}" in line
        assert line.startswith("→") == (estimate.schedule == plan.schedule)
    rows = plan.s_local * 2
    assert facts.metrics["shard_bytes"] == rows * 8 * (64 * 4 + 32 * 4 + 4) + rows * 4 * (64 + 32) * 4


TEXT = """\
Plan: 1024 queries × 1024 keys, blocks of 128 × 128; 3 ranks, this is 2; order contiguous; schedule ring (why)
mask: and_masks(causal(), document(ids=[1024]))

rank  sees
   0  ▒·······
   0  █▒······
   0  ··▒·····
   1  ··█▒····
   1  ··██▒···
   1  ··███▒··
   2  ··████▒·
   2  ··█████▒

work: blocks, mean 8.66667, most 11.5, max/mean 1.327
   0  █████████████                     4.75
   1  ███████████████████████████       9.75
   2  ████████████████████████████████  11.5

batch 2, 8:4 heads of 64, on a GPU (by hand); the slowest rank, predicted:
  schedule    forward ms  backward ms  MiB more  MiB sent, mean      most
  allgather        0.256        0.512       5.1             6.8       6.8
→ ring             0.266        0.512       4.5             3.4       5.6
  fetch            0.285        0.550       4.1             1.9       2.6
  ulysses          0.470        0.832       5.5             6.9       6.9
MiB of a rank: shard (q, k, v, out, lse) 3.4; at most in a pass: forward 6.4, backward with gradients 11.3

"""
MEANING = [
    "Who computes what: each of the 3 ranks computes the queries of 256 to 384 tokens; those of rank 0 are "
    "at 0-384.",
    "Is it even: no, the busiest rank has 33 % more work than the mean, so ranks wait 25 % of the time in "
    "attention.",
    "What is sent: 38.5 % of the keys that queries see are on another rank (remote share).",
    "How it is sent: ring: keys and values are sent from rank to rank, each as far as the last rank that "
    "sees them; at most 5.62 MiB sent by a rank, forward and backward.",
]


def test_the_text_of_a_small_plan_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = and_masks(causal(), document(lengths=[256, 768]))
    mask = create_block_mask(mod, 1, 1, 1024, 1024)
    plan = replace(build(mask, 3, 2, balancer="contiguous", schedule="ring"), reason="why")
    facts = PlanFacts.of(plan, Hardware("a GPU", 1e13, 1e10, 1e-5, 0.7, "by hand"), **LAYER)
    text, _, meaning = format_text(facts).partition("what this means:\n")
    assert text == TEXT and meaning.split() == " ".join(MEANING).split() and format_meaning(facts) == MEANING
    for imbalance, word in ((1.02, "yes"), (1.021, "nearly"), (1.1, "nearly"), (1.11, "no")):
        monkeypatch.setattr(Plan, "imbalance", imbalance)
        assert f"Is it even: {word}," in format_meaning(facts)[1]
    for count, where in ((4, "at 0-128, 256-384, 512-640, 768-896."), (5, "in 5 pieces.")):
        wide = create_block_mask(causal(), 1, 1, 256 * count, 256 * count)
        alternating = build(wide, 2, balancer=lambda work: [range(i, len(work.costs), 2) for i in (0, 1)])
        assert format_meaning(PlanFacts.of(alternating))[0].endswith(where)
    # Rank 0 has only an empty slot in the first batch row.
    idle = by_blocks(1024, 128, [[[], range(8)], [[0], range(1, 8)]])
    assert format_meaning(PlanFacts.of(replace(build(mask, 2), q=idle)))[0].endswith(" of 0 to 1K tokens.")


@pytest.mark.parametrize(("ranks", "width", "bars"), [(16, 64, 16), (17, 32, 0)])
def test_the_text_of_many_ranks_has_half_the_width_and_no_bars(ranks: int, width: int, bars: int) -> None:
    plan = document_plan(64, ranks, "contiguous", 1)
    assert len(format_blocks(plan)) == 1 + width and len(format_work(plan)) == 1 + bars


def plan_command(*words: str) -> str:
    done = invoke("plan", *words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.long
def test_the_command_shows_the_text_of_print_and_draws(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[1000, 3000, 4192]")
    words = "--lengths", str(tmp_path / "lengths.json"), "--world-size=4"
    mod = and_masks(causal(), document(lengths=[1000, 3000, 4192]))
    mask = create_block_mask(mod, 1, 1, 8192, 8192)
    want = str(tritoncp.make_plan(mask, world_size=4, rank=0, balancer="auto")).splitlines()
    got = plan_command(*words, f"--png={tmp_path / 'plan.png'}").splitlines()
    assert got[1] == "mask: causal & document" and [got[0], *got[2:]] == [want[0], *want[2:]]
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert "\nmask: causal & document, documents of 2K, 6K\n" in plan_command("--lengths=2K, 6K")


@pytest.mark.parametrize("ranks", [4, 11])  # the palette, and the rainbow
def test_a_terminal_shows_the_lines_of_a_rank_in_its_colour(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--seq-len={1024 * ranks}", f"--world-size={ranks}", "--balancer=contiguous"
    plain = plan_command(*words)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = plan_command(*words)
    assert "\x1b" not in plain and re.sub("\x1b[^m]*m", "", shown) == plain
    coloured = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+)m *(\d+)  ", shown)
    paint = (255 * drawing.colours(ranks)).round().int().tolist()
    assert [[*map(int, colour)] for *colour, _ in coloured] == [paint[int(rank)] for *_, rank in coloured]
    _, blocks, bars, *_ = plain.split("\n\n")
    rows = [row.split()[0] for row in [*blocks.split("\n")[1:], *bars.split("\n")[1:]]]
    assert [rank for *_, rank in coloured] == [row for row in rows if row.isdigit()]
    assert {int(rank) for *_, rank in coloured} == set(range(ranks)) and len(
        {*map(tuple, paint)}
    ) == ranks + 1


def test_plans_up_to_a_size_are_made() -> None:
    done = invoke("plan", "--seq-len=64M", "--block-size=32")
    assert done.exit_code == 2 and "67108864 tokens in 2097152 blocks on" in done.output
    for sizes in ((1 << 26, 1 << 20, 1 << 8), (1 << 26, 1 << 16, 1 << 12)):
        check_size(*sizes)
        for place, size in enumerate(sizes):
            with pytest.raises(ValueError, match="at most 67108864 tokens, 1048576 blocks, 4096 ranks, 2684"):
                check_size(*sizes[:place], size + 1, *sizes[place + 1 :])


def test_json_has_the_figures_of_the_plan() -> None:
    words = (
        "--mask=causal  & window(1K)",
        "--seq-len=64K",
        "--world-size=5",
        "--balancer=contiguous",
        "--json",
    )
    shape = "--heads=16", "--kv-heads=2", "--head-dim=64", "--dtype=float32"
    report = json.loads(plan_command(*words, *shape))
    mask = create_block_mask(sliding_window(1024), 1, 1, 1 << 16, 1 << 16)
    plan = tritoncp.make_plan(mask, world_size=5, rank=0, balancer="contiguous")
    layer = {"batch": 1, "heads": 16, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "itemsize": 4}
    assert report["work"] == plan.work and report["schedule"] == plan.schedule
    assert report["metrics"] == plan.metrics(**layer) and report["layer"] == {
        **layer,
        "latent": 0,
        "selected": 0,
    }
    schedule = report["schedules"][plan.schedule]
    assert schedule["sent_bytes"] == [plan.for_rank(rank).bytes_sent(**layer) for rank in range(5)]
    assert [schedule[name] for name in ("forward_ms", "backward_ms")] == [
        report["metrics"][name] for name in ("forward_ms", "backward_ms")
    ]
    assert report["mask"]["expression"] == "causal & window(1K)" and report["mask"]["q_len"] == 1 << 16


@pytest.mark.parametrize(
    ("lengths", "size", "rows"), [("[[256, 256], [500, 12]]", 512, 2), (",".join(["1"] * 300), 300, 1)]
)
def test_lengths_of_batch_rows_and_longer_than_a_file_name(lengths: str, size: int, rows: int) -> None:
    report = json.loads(plan_command(f"--lengths={lengths}", "--world-size=2", "--json"))
    assert report["layer"]["batch"] == rows and report["mask"]["q_len"] == size
