"""Cases of torch's flex attention tests under `torch.compile`.

Graphs hold the same op for both engines, so that plain torch suffices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import tritoncp
from tests.cases import Case
from tests.cases import check as check_case
from tests.compat.test_torch_calls import BUILTIN, attend_with_lse, causal, check, tensors
from tests.kernels.support.harness import F64, QKV
from tests.zoo import MASKS as ZOO_MASKS
from tests.zoo import SCORES as ZOO_SCORES
from tests.zoo import Sizes
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [*(Case((name, 5)) for name in ZOO_MASKS), *(Case(score=name) for name in ZOO_SCORES if name != "none")],
    ids=lambda case: f"{case.mask[0]}-{case.score}",
)
def test_the_zoo_compiles_whole(case: Case) -> None:
    """Masks and score_mods of attention-gym's kinds, among others, at every batch row and head."""
    check_case(replace(case, batch=2, own_lists=(True, True), compiled=True))


@pytest.mark.parametrize("name", ["identity", "causal", "squared", "alibi"])
def test_one_graph_for_all_lengths(name: str) -> None:
    counter, score = CompileCounterWithBackend("eager"), BUILTIN[name]

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        return tritoncp.flex_attention(q, k, v, score, mask, return_lse=True)

    compiled = torch.compile(layer, dynamic=True, backend=counter)
    for rows, length in ((2, 80), (4, 48), (6, 32)):
        mask = create_block_mask(causal, 1, 1, length, length, device="cpu", BLOCK_SIZE=16)
        x = tensors(length, batch=rows, heads=7)
        check(lambda *x, mask=mask: compiled(*x, mask), x, causal, score)
    assert counter.frame_count == 1


def test_a_named_tuple_in_a_closure_keeps_its_names() -> None:
    """The mask_mod's cell arrives in the graph as a plain tuple: AttributeError where it is called."""
    sizes = Sizes(1, 2, 32, 32)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= sizes.q // 4)

    mask = create_block_mask(mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    call = functools.partial(attend_with_lse, block_mask=mask)
    check(torch.compile(call, fullgraph=True, backend="eager"), tensors(32, heads=2), mod)


def chain(x: QKV, calls: int, attention: Callable[..., Tensor]) -> Tensor:
    q, k, v = x
    for i in range(calls):
        q = attention(q, k, v, BUILTIN[("relative", "causal")[i % 2]])
    return q


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("calls", [2, 3])
def test_multiple_calls_in_one_graph(calls: int, backend: str) -> None:
    x = tensors(32, heads=2, dtype=F64)
    compiled = torch.compile(
        lambda *x: chain(x, calls, tritoncp.flex_attention), fullgraph=True, backend=backend
    )
    out, want = (
        compiled(*x),
        chain(x, calls, lambda q, k, v, score: dense_attention(q, k, v, None, score).out),
    )
    start = torch.randn_like(out)
    for one, exact in ((out, want), *zip(*(torch.autograd.grad(y, x, start) for y in (out, want)))):
        torch.testing.assert_close(one, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradcheck(backend: str) -> None:
    x, gains = tensors(4, heads=2, dim=3, dtype=F64), torch.randn(2, dtype=F64)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * s * gains[h]

    call = functools.partial(tritoncp.flex_attention, score_mod=score, return_lse=True)
    assert torch.autograd.gradcheck(torch.compile(call, fullgraph=True, backend=backend), tuple(x))
