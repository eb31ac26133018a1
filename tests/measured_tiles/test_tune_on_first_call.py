"""Tests of tuning at the first call: when it runs, its command, waiting ranks, and failures."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.command_process import invoke
from tests.measured_tiles.measured_tiles import CPU, attend, launched, places
from tests.multiprocess.ranks import run as on_ranks
from tritoncp import causal, create_block_mask, flex_attention, make_plan, plan_cache_clear, sliding_window
from tritoncp.measured_tiles import tile_tables, tune_on_first_call
from tritoncp.measured_tiles.tile_lookup import MEASURED_KINDS, TileKey
from tritoncp.tuning import command, search

__all__ = ["launched", "places"]  # fixtures

# Replaces the command: writes 16 x 32 tiles for its targets, or fails in some way.
STUB = """
import json, os, pathlib, sys, time
words, folder = dict(zip(sys.argv[1::2], sys.argv[2::2])), pathlib.Path(os.environ["TRITONCP_CONFIG_DIR"])
path, how = folder / os.environ["STUB_WRITES"], os.environ.get("STUB", "")
with (folder.parent / "ran.txt").open("a") as ran:
    ran.write(" ".join(sys.argv[1:]) + "\\n")
assert "TRITONCP_AUTOTUNE" not in os.environ
if how == "fail":
    sys.exit("torch finds no GPU")
if how == "die":
    os.abort()
if how == "hang":
    time.sleep(60)
dims = words["--shapes"].split(",")[1].split("x")
about = {"dtype": words["--dtype"], "head_dim": int(dims[0]), "v_head_dim": int(dims[-1])}
about["mask"] = {"document": "interval"}.get(words["--mask"], words["--mask"])
about |= {"score": words["--score-mod"]} if "--score-mod" in words else {}
tiles = {"BLOCK_M": 16, "BLOCK_N": 32}
old = json.loads(path.read_text())["entries"] if path.exists() else []
new = [{"kernel": kernel, **about, "config": tiles} for kernel in ("forward", "dq", "dkdv")]
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text("{" if how == "tear" else json.dumps({"entries": old + new}))
"""


@pytest.fixture
def stub(places, monkeypatch, launched):
    """Let this CPU be tuned by a stub command; return the file of its command lines."""
    plan_cache_clear()  # engines are kept with plans
    monkeypatch.setattr(tune_on_first_call, "_tunable", lambda device: True)
    monkeypatch.setattr(tune_on_first_call, "COMMAND", (sys.executable, "-S", "-c", STUB))
    monkeypatch.setenv("STUB_WRITES", str(tile_tables.path_in(places, CPU).relative_to(places)))
    monkeypatch.setenv("TRITONCP_AUTOTUNE", "1")
    ran = places / "ran.txt"
    return lambda: ran.read_text().splitlines() if ran.exists() else []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:TRITONCP_AUTOTUNE")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_first_call_of_a_kind_is_tuned_if_requested(stub, launched, compiled):
    call = torch.compile(flex_attention, backend="eager", fullgraph=True) if compiled else flex_attention
    attend(causal(), call=call)
    assert dict(launched) == {"forward": 16, "delta": 64, "dq": 16, "dkdv": 16}, "the call itself has them"
    first = "--shapes 1x1,16,1024 --mask causal --ops fwd,bwd --dtype float32 --budget 60s"
    attend(causal(), call=call)
    assert stub() == [first]
    attend(sliding_window(8), lambda s, b, h, q, kv: s * 2, call=call)
    attend(sliding_window(8), lambda s, b, h, q, kv: s * 3, call=call)
    assert stub() == [first, first.replace("causal", "window") + " --score-mod softcap"]


def test_nothing_is_tuned_unless_requested(stub, monkeypatch):
    for name, value in (("TRITONCP_AUTOTUNE", "0"), ("TRITONCP_CONFIG_DIR", "-")):
        with monkeypatch.context() as call:
            call.setenv(name, value)
            attend(causal())
    monkeypatch.delenv("TRITONCP_AUTOTUNE")
    attend(causal())
    monkeypatch.setenv("TRITONCP_AUTOTUNE", "soon")
    with pytest.warns(UserWarning, match=r"TRITONCP_AUTOTUNE='soon' is not understood; accepted: 0, 1 .*90s"):
        attend(sliding_window(8))
    assert stub() == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fail", "torch finds no GPU"),
        ("die", "ended with -6"),
        ("hang", "had not ended after 1 s"),
        ("tear", "ended with 0"),
        ("no program", "No such file"),
    ],
)
@pytest.mark.filterwarnings("ignore:TRITONCP_AUTOTUNE")
@pytest.mark.filterwarnings("ignore:.*is not a file of tritoncp autotune")
def test_a_call_after_failed_tuning_has_the_same_results(places, stub, launched, monkeypatch, how, said):
    monkeypatch.setenv("STUB", how)
    monkeypatch.setenv("TRITONCP_AUTOTUNE", "0.5s")
    if how == "no program":
        monkeypatch.setattr(tune_on_first_call, "COMMAND", ("/nowhere/python",))
    with pytest.warns(UserWarning, match=f"could not be tuned, so that built-in defaults are used: .*{said}"):
        attend(causal())
    assert dict(launched)["forward"] == 128
    count = len(stub())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*could not be tuned")
        attend(causal())
    assert len(stub()) == count, "once is enough"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("together", [False, True])
def test_processes_of_one_machine_tune_once(stub, launched, together):
    """One tunes and the rest use its result: independent processes, as in data parallel training, and ranks
    of a group."""

    def work(group):
        if not together:
            attend(causal())
            return dict(launched)["forward"]
        plan = make_plan(create_block_mask(causal(), 1, 1, 96, 96, BLOCK_SIZE=16), group)
        x = torch.randn(1, 1, plan.s_local, 16)
        flex_attention(x, x, x, plan, group)
        return dict(launched)["forward"]

    assert on_ranks(3, work) == [16] * 3 and len(stub()) == 1


def test_a_call_continues_after_waiting_too_long_for_another_process(stub, places, monkeypatch):
    monkeypatch.setenv("TRITONCP_AUTOTUNE", "0.2s")
    path = tile_tables.path_in(places / "given", CPU).with_suffix(".tuning")
    with (
        tile_tables.locked(path, 60),
        pytest.warns(UserWarning, match="could not be tuned.*another process .* has held"),
    ):
        attend(causal())
    assert stub() == []


def test_the_command_tunes_the_device_of_the_call(monkeypatch, gpus):
    """Only this device is visible to the command: the GPUs of other ranks are busy."""
    gpus(current=1)
    cuda_device, first = torch.device("cuda"), torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [
        tune_on_first_call._environment(device)["CUDA_VISIBLE_DEVICES"] for device in (cuda_device, first)
    ] == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7f,6")
    assert tune_on_first_call._environment(cuda_device)["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3,5")
    assert tune_on_first_call._environment(first)["HIP_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("mask", tune_on_first_call.MEASURED)
def test_the_command_accepts_the_arguments_of_a_call_and_writes_its_entries(mask, monkeypatch):
    call = TileKey("bfloat16", (192, 128), mask, score=True)
    words = tune_on_first_call._command_arguments(call, (16, 8, 3000), 60.0)
    names = []
    monkeypatch.setattr(command, "find_device", lambda: tile_tables.Device("sm_90", "NVIDIA H200"))

    def record(targets, *rest):
        names.extend(target.kernel for target in targets)
        return search.TuningResult([], 0, 0, Path("journal"), False)

    monkeypatch.setattr(search, "autotune", record)
    assert invoke("autotune", *words).exit_code == 1, "nothing was measured"
    assert names == ["forward", "dq", "dkdv"] and MEASURED_KINDS[tune_on_first_call.MEASURED[mask]] == mask
