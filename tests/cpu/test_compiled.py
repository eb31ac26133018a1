"""Tests of COMPILE: score_mods on the CPU engine through torch.compile."""

from __future__ import annotations

import warnings

import pytest
import torch

import tritoncp
from tritoncp import causal
from tritoncp.cpu import compiled

S = 40


def answers(**options: bool) -> list[torch.Tensor]:
    """Return out and the gradients of a call with a score_mod that captures a tensor."""
    g = torch.Generator().manual_seed(2)
    x = [torch.randn(1, heads, S, 16, generator=g).requires_grad_() for heads in (4, 2, 2)]
    slopes = torch.randn(4, generator=g, requires_grad=True)

    def score(s, b, h, q, kv):
        return 3 * torch.tanh(s / 3) + slopes[h] * (q - kv) / S

    mask = tritoncp.create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16)
    out = tritoncp.flex_attention(*x, score, mask, enable_gqa=True, kernel_options=options)
    return [out, *torch.autograd.grad(out, [*x, slopes], torch.randn(out.shape, generator=g))]


@pytest.mark.long
@pytest.mark.parametrize("by_variable", [False, True])
def test_compiled_answers_are_those_of_plain_torch(by_variable, cpu_engine, monkeypatch):
    calls = []
    compile = compiled.compiled
    monkeypatch.setattr("tritoncp.cpu.engine.compiled", lambda f: calls.append(f) or compile(f))
    want = answers()
    assert not calls
    monkeypatch.setenv("TRITONCP_CPU_COMPILE", str(int(by_variable)))
    got = answers(**({} if by_variable else {"COMPILE": True}))
    assert len(set(calls)) == 2  # forward and backward
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_without_a_compiler_the_call_runs_uncompiled_with_one_warning(cpu_engine, monkeypatch):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler

    want = answers()
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    compiled._has_compiler.cache_clear()
    with pytest.warns(UserWarning, match="COMPILE is requested, .* no C\\+\\+ compiler"):
        got = answers(COMPILE=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers(COMPILE=True)
    compiled._has_compiler.cache_clear()
    assert all(map(torch.equal, got, want))


def test_kernels_refuse_it():
    with pytest.raises(ValueError, match="COMPILE=True is for the CPU engine"):
        answers(COMPILE=True)
    with pytest.raises(ValueError, match="COMPILE=1; True or False is needed"):
        answers(COMPILE=1)
