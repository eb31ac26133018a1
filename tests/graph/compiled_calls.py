"""Compiled functions, compared with the same functions without compilation."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tritoncp

S = 32


class Compiled:
    """A compiled function, compared with the plain function at each call."""

    def __init__(self, fn, fullgraph=True, dynamic=None, backend="aot_eager"):
        self.fn, self.counter = fn, CompileCounterWithBackend(backend)
        self.fast = torch.compile(fn, backend=self.counter, fullgraph=fullgraph, dynamic=dynamic)
        self.tolerance = 1e-5 if backend == "inductor" else 1e-6

    def check(self, *args):
        want, got = self.fn(*args), self.fast(*args)
        torch.testing.assert_close(got, want, rtol=self.tolerance, atol=self.tolerance)
        return got


def attend(x, score_mod):
    return tritoncp.flex_attention(x + 1, x, x, score_mod) * 2


def x_of(seed=0, heads=2):
    return torch.randn(1, heads, S, 8, generator=torch.Generator().manual_seed(seed))
