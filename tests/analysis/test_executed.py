"""`tritoncp inspect --executed`: counts of kernels that run on the CPU as they are compiled, and of torch's
template beside them.  Kernels are compiled only in a process without TRITON_INTERPRET."""

import json
from typing import Any

import pytest

from tests.command_process import tritoncp
from tritoncp.analysis import torch_templates
from tritoncp.analysis.executed import draw_call, template_tensors
from tritoncp.analysis.jobs import parse_shape
from tritoncp.perf.problem import Problem


def run(*words: str) -> list[dict[str, Any]]:
    done = tritoncp("inspect", "--executed", "--json", *words, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_forward_pass_is_counted_beside_torchs_template() -> None:
    """The causal forward pass on an A100 is right and spills nothing. It has the matrix products of torch's
    default tile, and less of everything else."""
    own, other = run("--arch", "sm_80", "--shape", "2x1,64x32,256", "--against", "torch")
    assert (own["who"], other["who"]) == ("tritoncp", "torch")
    assert own["error"] < 0.01 and other["error"] < 0.01 and own["spill_bytes"] == 0 < own["registers"] < 256
    assert own["flops"] == other["flops"] > 0
    for name in ("instructions", "special", "wavefronts", "sectors"):
        assert 0 < own[name] < other[name], name


@pytest.mark.long
def test_a_forward_pass_is_counted_beside_torchs_template_on_blackwell() -> None:
    """Its products have the same number of FLOPs as torch's."""
    own, other = run("--arch", "sm_100", "--shape", "1x1,64,256", "--against", "torch")
    assert own["error"] < 0.01 and other["error"] < 0.01
    assert own["flops"] == other["flops"] > 0 and own["instructions"] < other["instructions"]


@pytest.mark.long
def test_a_route_is_counted_beside_the_loops() -> None:
    loops, route = run(
        "--arch", "sm_100", "--shape", "1x1,64,256", "--mask", "full", "--route", "specialized"
    )
    assert (loops["who"], route["who"]) == ("tritoncp", "tritoncp, specialized")
    assert loops["error"] < 0.01 and route["error"] < 0.01
    assert loops["flops"] == route["flops"] > 0 and route["wavefronts"] < loops["wavefronts"]


def test_a_route_that_a_call_cannot_take_is_refused() -> None:
    done = tritoncp(
        "inspect", "--executed", "--arch", "sm_90", "--route", "specialized", TRITON_INTERPRET="0"
    )
    assert done.returncode != 0 and "this is sm_90" in done.stderr
    done = tritoncp("inspect", "--executed", "--backward", "--route", "gluon")
    assert done.returncode != 0 and "forward pass" in done.stderr


@pytest.mark.long
def test_the_backward_pass_of_a_users_mask_and_score_mod_is_counted() -> None:
    words = ["--mask", "window(40) & causal", "--score", "softcap(20)", "--backward", "--shape", "2x2,64,128"]
    (row,) = run("--arch", "sm_90", *words)
    assert row["error"] < 0.02 and row["instructions"] > 0 and row["flops"] > 0
    assert row["tiles"].count("×") == 2, "dQ, and dK/dV"


@pytest.mark.long
def test_a_backward_pass_is_counted_beside_torchs_template() -> None:
    own, other = run("--arch", "sm_90", "--shape", "2x1,64x32,128", "--backward", "--against", "torch")
    assert own["error"] < 0.02 and other["error"] < 0.02


@pytest.mark.nightly
def test_tiles_of_torch_that_do_not_fit_are_left_out() -> None:
    """Its default tiles for heads of 512 need more shared memory than a block of an H100 has."""
    own, *others = run("--arch", "sm_90", "--shape", "1x1,512,64", "--against", "torch")
    assert own["error"] < 0.01 and own["spill_bytes"] == 0
    assert all(other["who"] == "torch autotuned" and other["spill_bytes"] == 0 for other in others)


def test_a_shape_gives_heads_widths_and_length() -> None:
    problem = parse_shape("4x2,64x32,512")
    assert (problem.dim, problem.v_dim, problem.kv_heads) == (64, 32, 2)


@pytest.mark.long
def test_torchs_candidates_begin_with_its_default() -> None:
    default, *rest = torch_templates.candidates("forward", "sm_80", Problem("causal", 512))
    assert default.default and default.name == "128×64 8/3" and rest and not any(job.default for job in rest)
    problem = Problem("document", 512, 2, 1, 64, 64)
    tensors = template_tensors(draw_call(problem), "backward")
    job = next(torch_templates.candidates("backward", "sm_90", problem))
    assert "tl.load(arg_DOCUMENT" in torch_templates.write_source(job, tensors)
