"""Tests of the command `tritoncp plan`."""

import io
import json

import pytest
from click.testing import CliRunner

import tritoncp
from tritoncp.cli import main


def plan_command(*words) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["plan", *words])
    return done.exit_code, done.output


def test_plan_shows_the_text_of_print(tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[1000, 3000, 4192]")
    code, output = plan_command("--lengths", str(lengths), "--world-size=4")
    mod = tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=[1000, 3000, 4192]))
    mask = tritoncp.create_block_mask(mod, 1, 1, 8192, 8192)
    plan = tritoncp.make_plan(mask, world_size=4, rank=0, balancer="auto")
    assert (code, output) == (0, f"{plan}\n")


def test_plan_in_json_is_the_plans_own_figures():
    words = (
        "--mask=causal & window(1K)",
        "--seq-len=64K",
        "--world-size=5",
        "--balancer=contiguous",
        "--json",
    )
    code, output = plan_command(*words, "--heads=16", "--kv-heads=2", "--head-dim=64", "--dtype=float32")
    report = json.loads(output)
    mask = tritoncp.create_block_mask(tritoncp.sliding_window(1024), 1, 1, 1 << 16, 1 << 16)
    plan = tritoncp.make_plan(mask, world_size=5, rank=0, balancer="contiguous")
    assert code == 0 and report["work"] == plan.work and report["schedule"] == plan.schedule
    assert report["metrics"] == plan.metrics(heads=16, kv_heads=2, head_dim=64, v_head_dim=64, itemsize=4)
    layer = {"batch": 1, "heads": 16, "kv_heads": 2, "head_dim": 64, "itemsize": 4}
    assert report["schedules"][plan.schedule]["sent_bytes"] == [
        plan.for_rank(rank).bytes_sent(**layer) for rank in range(5)
    ]
    assert report["layer"]["v_head_dim"] == 64 and report["mask"]["q_len"] == 1 << 16


def test_plan_draws_a_picture(tmp_path):
    assert plan_command("--mask=full", f"--png={tmp_path / 'a' / 'plan.png'}", "--seq-len=4K")[0] == 0
    assert (tmp_path / "a" / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_plan_takes_batch_rows_with_documents_of_their_own():
    code, output = plan_command("--lengths=[[256, 256], [500, 12]]", "--world-size=2", "--json")
    report = json.loads(output)
    assert code == 0 and report["layer"]["batch"] == 2 and report["mask"]["q_len"] == 512


def test_plan_shows_the_mask_as_it_was_written():
    written = "causal  and window(4K) | ~prefix(1K)"
    words = (f"--mask={written}", "--seq-len=8K", "--world-size=2")
    expression = "causal and window(4K) | ~prefix(1K)"
    assert f"\nmask: {expression}\n" in plan_command(*words)[1]
    assert json.loads(plan_command(*words, "--json")[1])["mask"]["expression"] == expression
    inline = plan_command("--lengths=2K, 6K", "--world-size=2")[1]
    assert "\nmask: causal & document, documents of 2K, 6K\n" in inline


def test_plan_on_a_terminal_is_in_colour():
    from rich.console import Console

    from tritoncp.planning.report import command

    class Terminal(Console):
        def __init__(self) -> None:
            super().__init__(force_terminal=True, color_system="truecolor", file=output, width=200)

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "Console", Terminal)
        assert plan_command("--seq-len=1K", "--world-size=2")[0] == 0
    assert "\x1b[38;2;68;119;170m" in output.getvalue(), "rank 0 in its colour"


def test_lengths_that_are_longer_than_a_file_name_are_numbers():
    code, output = plan_command("--lengths", ",".join(["1"] * 300), "--json")
    assert code == 0 and json.loads(output)["mask"]["q_len"] == 300
