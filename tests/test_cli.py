"""The command line, as a user runs it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tritoncp as tritoncp_package
from tritoncp import __version__, doctor
from tritoncp.cli import main

ROOT = Path(__file__).parents[1]


def tritoncp(*words, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tritoncp", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_module_is_the_command():
    done = tritoncp("--version")
    assert (done.returncode, done.stdout) == (0, f"tritoncp, version {__version__}\n")


def test_help_names_every_command():
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(name in shown for name in main.commands)


def test_an_unknown_command_is_an_error():
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2


def test_doctor_reports_in_json_what_this_process_sees(tmp_path):
    done = tritoncp("doctor", "--json", TRITONCP_CACHE_DIR=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["problems"] == []
    assert report["versions"]["torch"] == str(torch.__version__)
    assert len(report["devices"]) == torch.cuda.device_count()
    assert report["cache"]["path"] == str(tmp_path / "mods")
    assert "gloo" in report["distributed"]
    assert not (tmp_path / "mods").exists(), "doctor looks and makes nothing"


def test_doctor_shows_a_table_to_people():
    shown = CliRunner().invoke(main, ["doctor"]).output
    assert "CPU tensors run" in shown and str(torch.__version__).split("+")[0] in shown


def test_doctor_fails_on_a_cache_others_may_write(tmp_path):
    (tmp_path / "mods").mkdir()
    (tmp_path / "mods").chmod(0o777)
    done = tritoncp("doctor", TRITONCP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "others may write" in done.stdout and "set TRITONCP_CACHE_DIR" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": "2.10.1", "triton": "3.6.0", "numpy": "2"}, "torch 2.10.1 is too old: 2.11 or newer"),
        ({"torch": "2.11.0", "triton": "3.5.1", "numpy": "2"}, "triton 3.5.1 is too old: 3.6 or newer"),
        ({"torch": "2.11.0", "triton": "3.10.0", "numpy": None}, "TRITON_INTERPRET=1 needs NumPy"),
        ({"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.4.0"}, "triton 3.6.0 cannot be interpreted with"),
    ],
)
def test_doctor_says_what_is_wrong_and_what_to_do(versions, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.problems(versions, True, {"path": "/x", "usable": True, "state": ""})
    assert len(found) == 1 and found[0].startswith(said)


def test_doctor_warns_when_a_gpu_would_be_left_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    versions = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.0"}
    assert "unset it" in doctor.problems(versions, True, {"path": "/x", "usable": True, "state": ""})[0]
    assert doctor.problems(versions, False, {"path": "/x", "usable": True, "state": ""}) == []


def test_the_benchmark_has_its_own_help_and_errors(tmp_path):
    shown = CliRunner().invoke(main, ["perf", "run", "--help"]).output
    assert "tritoncp perf run" in shown and "--budget" in shown
    done = CliRunner().invoke(
        main, ["perf", "run", "--device", "cpu", "--only", "nothing", "--out", str(tmp_path)]
    )
    assert done.exit_code == 2 and "'nothing'" in done.output


def plan_command(*words) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["plan", *words])
    return done.exit_code, done.output


def test_plan_shows_what_print_shows(tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[1000, 3000, 4192]")
    code, shown = plan_command("--lengths", str(lengths), "--world-size=4")
    mod = tritoncp_package.and_masks(
        tritoncp_package.causal(), tritoncp_package.document(lengths=[1000, 3000, 4192])
    )
    mask = tritoncp_package.create_block_mask(mod, 1, 1, 8192, 8192)
    assert (code, shown) == (0, f"{tritoncp_package.make_plan(mask, world_size=4, rank=0)}\n")


def test_plan_in_json_is_the_plans_own_figures():
    words = (
        "--mask=causal & window(1K)",
        "--seq-len=64K",
        "--world-size=5",
        "--balancer=contiguous",
        "--json",
    )
    code, shown = plan_command(*words, "--heads=16", "--kv-heads=2", "--head-dim=64", "--dtype=float32")
    report = json.loads(shown)
    mask = tritoncp_package.create_block_mask(tritoncp_package.sliding_window(1024), 1, 1, 1 << 16, 1 << 16)
    made = tritoncp_package.make_plan(mask, world_size=5, rank=0, balancer="contiguous")
    assert code == 0 and report["work"] == made.work and report["schedule"] == made.schedule
    layer = {"batch": 1, "heads": 16, "kv_heads": 2, "head_dim": 64, "itemsize": 4}
    assert report["schedules"][made.schedule]["sent_bytes"] == [
        made.for_rank(rank).bytes_sent(**layer) for rank in range(5)
    ]
    assert report["layer"]["v_head_dim"] == 64 and report["mask"]["q_len"] == 1 << 16


def test_plan_draws_a_picture_and_a_page(tmp_path):
    words = (f"--png={tmp_path / 'a' / 'plan.png'}", f"--html={tmp_path / 'plan.html'}", "--seq-len=4K")
    assert plan_command("--mask=full", *words)[0] == 0
    assert (tmp_path / "a" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_plan_takes_batch_rows_with_documents_of_their_own():
    code, shown = plan_command("--lengths=[[256, 256], [500, 12]]", "--world-size=2", "--json")
    report = json.loads(shown)
    assert code == 0 and report["layer"]["batch"] == 2 and report["mask"]["q_len"] == 512


def test_plan_on_a_terminal_is_in_colour():
    from rich.console import Console

    from tritoncp import planned

    class Terminal(Console):
        def __init__(self) -> None:
            super().__init__(force_terminal=True, color_system="truecolor", file=said, width=200)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "Console", Terminal)
        assert plan_command("--seq-len=1K", "--world-size=2")[0] == 0
    assert "\x1b[38;2;68;119;170m" in said.getvalue(), "rank 0 in its colour"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mask", "causal & cusal"], "^^^^^"),
        (["--seq-len", "12Q"], "no whole number of tokens"),
        (["--lengths", "10 20", "--seq-len", "40"], "are 30 tokens together"),
        (["--heads", "6", "--kv-heads", "4"], "must be a multiple"),
        (["--balancer", "fair"], "'fair' is not one of"),
        (["--seq-len", "1K", "--png", "/dev/null/plan.png"], "/dev/null"),
    ],
)
def test_mistakes_in_plan_are_said_in_a_line(words, said):
    code, shown = plan_command(*words)
    assert code != 0 and said in shown and "Traceback" not in shown
