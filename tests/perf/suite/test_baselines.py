"""Every contender computes the case that it is timed on, in the forms of tritoncp and of PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, varlen

from tritoncp.call.sinks import with_sinks
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite import baselines, check
from tritoncp.perf.suite.cases import CASES, Case
from tritoncp.perf.suite.measure import work_of
from tritoncp.reference.dense import dense_attention

CPU = torch.device("cpu")

MASKS = dict.fromkeys(case.problem.mask for case in CASES)


def small(mask: str, queries: int = 0) -> Problem:
    return Case(Problem(mask, 16384, queries=queries), "forward").shrunk().problem


def problem(mask: str):
    case = small(mask)
    return case, baselines.inputs(case, CPU)


def assert_right(contender: baselines.Contender, expected: check.Answer) -> None:
    for actual, expected_tensor in zip((contender.forward(), *contender.backward()), expected):
        assert check.find_fault("a result", actual, expected_tensor, torch.float32) is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_the_oracle_and_tritoncp_agrees(mask):
    case, tensors = problem(mask)
    expected = check.reference(case, tensors)
    q, k, v = (x.detach().double().requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    closed = case.closed_form()
    rows = torch.arange(case.seq)
    visible = None if closed is None else closed(None, None, rows[:, None], rows)[None, None]
    dense = dense_attention(q, k, v, visible, case.score_mod(CPU))
    sinks = case.sinks(CPU)
    oracle = dense.out if sinks is None else with_sinks(dense.out, dense.lse, sinks)[0]
    grads = torch.autograd.grad(oracle, (q, k, v), tensors.dout.double())
    for actual, expected_tensor in zip(expected, (oracle.detach(), *grads)):
        torch.testing.assert_close(actual, expected_tensor, rtol=1e-12, atol=1e-12)

    contender = baselines.one_device(case, tensors)
    assert_right(contender, expected)


@pytest.mark.long
@pytest.mark.parametrize("mask", MASKS)
def test_torch_flex_attention_computes_the_same_case(mask):
    case, tensors = problem(mask)
    # torch refuses to differentiate flex attention on a CPU
    frozen = baselines.Inputs(*(x.detach() for x in (tensors.q, tensors.k, tensors.v, tensors.dout)))
    actual = baselines.flex(case, frozen).forward()
    assert check.find_fault("out", actual, check.reference(case, tensors).out, torch.float32) is None


def test_cases_of_few_queries_are_measured_like_others() -> None:
    case = small("full", queries=3)
    tensors = baselines.inputs(case, CPU)
    expected_tensor = check.reference(case, tensors)
    three, one = (work_of(Case(size, "forward")).flops for size in (case, replace(case, queries=1)))
    assert tensors.q.shape[2] == 3 and three == 3 * one
    frozen = baselines.Inputs(*(x.detach() for x in (tensors.q, tensors.k, tensors.v, tensors.dout)))
    dense = baselines.dense(case, tensors, SDPBackend.MATH)
    for contender in (baselines.one_device(case, frozen), baselines.flex(case, frozen), dense):
        assert check.find_fault("out", contender.forward(), expected_tensor.out, torch.float32) is None


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_dense_kernels_compute_the_same_case(mask, backend):
    case, tensors = problem(mask)
    contender = baselines.dense(case, tensors, backend)
    assert_right(contender, check.reference(case, tensors))


@pytest.mark.parametrize("mask", ["document", "window"])
def test_the_packed_kernel_computes_the_same_case(mask, monkeypatch):
    """A dense stand-in follows the documentation of the GPU's kernel."""
    case, tensors = problem(mask)

    def stand_in(q, k, v, edges, edges_k, longest, longest_k, *, window_size, enable_gqa):
        assert torch.equal(edges, edges_k) and enable_gqa
        assert longest == longest_k == int(edges.diff().max())
        rows = torch.arange(len(q))
        document = torch.bucketize(rows, edges[1:], right=True)
        gap = rows[:, None] - rows
        left, right = (len(q) if width < 0 else width for width in window_size)
        visible = (document[:, None] == document) & (gap <= left) & (-gap <= right)
        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        return dense_attention(*batched, visible[None, None]).out[0].transpose(0, 1)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    contender = baselines.packed(case, tensors)
    assert_right(contender, check.reference(case, tensors))


@pytest.mark.parametrize("harm", ["one tile", "one row", "a NaN", "another scale"])
def test_a_wrong_result_has_a_fault(harm):
    torch.manual_seed(0)
    expected = torch.randn(1, 2, 1024, 64)
    actual = expected.bfloat16()
    assert check.find_fault("out", actual, expected, torch.bfloat16) is None
    if harm == "one tile":
        actual[0, 1, 128:192] = actual[0, 1, 64:128].clone()
    elif harm == "one row":
        actual[0, 0, 77] = 0
    elif harm == "a NaN":
        actual[0, 0, 3, 3] = float("nan")
    else:
        actual *= 1.02
    assert "out is off by" in (check.find_fault("out", actual, expected, torch.bfloat16) or "")


def test_a_baseline_that_cannot_express_a_case_takes_no_part():
    case, tensors = problem("prefix")
    assert set(baselines.contenders(case, tensors, ["flex"])) == {"tritoncp", "flex"}
