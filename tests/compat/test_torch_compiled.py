"""Cases of torch's flex attention tests under `torch.compile` and in checkpoints.

Graphs hold the same op for both engines, so that plain torch suffices.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tritoncp
from tests.cases import AUX, Case, answers, expected
from tests.cases import agree as verify_answers
from tests.cases import tensors as zoo_tensors
from tests.compat.dense import F64, attend, check
from tests.compat.test_torch_calls import attend_with_lse, causal, chain, tensors
from tests.compat.torch_mods import BUILTIN, Dims, normal
from tests.zoo import MASKS as ZOO_MASKS
from tests.zoo import SCORES as ZOO_SCORES

plain_torch = pytest.mark.parametrize("engine", ["cpu"], indirect=True)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.long
@plain_torch
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", BUILTIN)
def test_compiled_whole(name: str, backend: str, engine: str) -> None:
    x, score = tensors(Dims(1, 2, 32)), BUILTIN[name].bind()
    mask = create_block_mask(causal, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16)
    call = functools.partial(tritoncp.flex_attention, score_mod=score, block_mask=mask, return_lse=True)
    check(torch.compile(call, fullgraph=True, backend=backend), x, BUILTIN[name].bind, mask_mod=causal)


@pytest.mark.long
@plain_torch
@pytest.mark.parametrize(
    "case",
    [*(Case((name, 5)) for name in ZOO_MASKS), *(Case(score=name) for name in ZOO_SCORES if name != "none")],
    ids=lambda case: f"{case.mask[0]}-{case.score}",
)
def test_the_zoo_compiles_whole(case: Case, engine: str) -> None:
    """Masks and score_mods of attention-gym's kinds, among others, at every batch row and head."""
    case = replace(case, batch=2, own_lists=(True, True))
    mask = case.block_mask()

    def call(case: Case, q: Tensor, k: Tensor, v: Tensor, learned: Any = None) -> list[Tensor]:
        score = case.score_mod(learned)
        layer = functools.partial(tritoncp.flex_attention, score_mod=score, block_mask=mask, return_aux=AUX)
        out, aux = torch.compile(layer, fullgraph=True, backend="eager")(q, k, v)
        return [out, aux.lse, aux.max_scores]

    verify_answers(case, answers(case, zoo_tensors(case), call), expected(case))


@plain_torch
@pytest.mark.parametrize("name", ["identity", "causal", "squared", "alibi"])
def test_one_graph_for_all_lengths(name: str, engine: str) -> None:
    counter, score = CompileCounterWithBackend("eager"), BUILTIN[name].bind()

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        return tritoncp.flex_attention(q, k, v, score, mask, return_lse=True)

    compiled = torch.compile(layer, dynamic=True, backend=counter)
    for rows, length in ((2, 80), (4, 48), (6, 32)):
        mask = create_block_mask(causal, 1, 1, length, length, device="cpu", BLOCK_SIZE=16)
        x, bind = tensors(Dims(rows, 7, length)), BUILTIN[name].bind
        check(lambda *x, mask=mask: compiled(*x, mask), x, bind, mask_mod=causal)
    assert counter.frame_count == 1


@plain_torch
def test_a_size_in_the_closure_of_a_score_mod(engine: str) -> None:
    counter = CompileCounterWithBackend("eager")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.shape[0]
        return tritoncp.flex_attention(q, k, v, lambda s, b, h, i, j: s + rows * b)

    compiled = torch.compile(layer, dynamic=True, backend=counter)
    for rows in (4, 6, 8):
        x = tensors(Dims(rows, 2, 16))
        want, _ = attend(*(t.to(F64) for t in x), lambda s, b, h, i, j, rows=rows: s + rows * b)
        torch.testing.assert_close(compiled(*x).to(F64), want, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@plain_torch
def test_a_mod_made_in_the_graph_around_constants(engine: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return attend_with_lse(q, k, v, lambda s, b, h, i, j: s * factor)

    call = torch.compile(functools.partial(layer, factor=2.0), fullgraph=True, backend="eager")
    check(call, tensors(Dims(1, 2, 32)), lambda: lambda s, b, h, i, j: s * 2.0)


@plain_torch
def test_a_named_tuple_in_a_closure_keeps_its_names(engine: str) -> None:
    """The mask_mod's cell arrives in the graph as a plain tuple: AttributeError where it is called."""
    dims = Dims(1, 2, 32)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= dims.q // 4)

    mask = create_block_mask(mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    call = functools.partial(attend_with_lse, block_mask=mask)
    check(torch.compile(call, fullgraph=True, backend="eager"), tensors(dims), mask_mod=mod)


@plain_torch
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("calls", [2, 3])
def test_multiple_calls_in_one_graph(calls: int, backend: str, engine: str) -> None:
    x = tensors(Dims(1, 2, 32))
    compiled = torch.compile(
        lambda *x: chain(list(x), calls, tritoncp.flex_attention), fullgraph=True, backend=backend
    )
    out, want = compiled(*x), chain(x, calls, tritoncp.flex_attention)
    torch.testing.assert_close(out, want)
    start = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, start), torch.autograd.grad(want, x, start))


@plain_torch
def test_multiple_mask_calls(engine: str) -> None:
    x = tensors(Dims(1, 2, 48))
    masks = [
        create_block_mask(mod, 1, None, 48, 48, device="cpu", BLOCK_SIZE=16)
        for mod in (causal, tritoncp.and_masks(causal, lambda b, h, i, j: i <= j + 12))
    ]

    def both(*x: Tensor) -> Tensor:
        return tritoncp.flex_attention(*x, masks[0]) + tritoncp.flex_attention(*x, masks[1])

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(both(*x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(compiled(*x).sum(), x), want)


class Gated(torch.nn.Module):
    """A score_mod that the module makes from its parameters in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        self.register_buffer("bias", torch.randn(2, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate, bias = torch.sigmoid(self.gain), 2 * self.bias
        return tritoncp.flex_attention(q.sin(), k, v, lambda s, b, h, i, j: s + gate[h] * bias[h, i]).cos()


@plain_torch
def test_tensors_made_in_the_graph_are_captured(engine: str) -> None:
    module, x = Gated(), tensors(Dims(1, 2, 32))
    leaves = [*x, module.gain]
    compiled = torch.compile(module, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*x).sum(), leaves) for f in (compiled, module))
    torch.testing.assert_close(got, want)


@plain_torch
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradcheck(backend: str, engine: str) -> None:
    x, gains = tensors(Dims(1, 2, 4, 3), F64), normal(2)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * s * gains[h]

    call = functools.partial(tritoncp.flex_attention, score_mod=score, return_lse=True)
    assert torch.autograd.gradcheck(torch.compile(call, fullgraph=True, backend=backend), x)


@plain_torch
def test_learned_bias_of_a_compiled_call(engine: str) -> None:
    x, table = tensors(Dims(1, 1, 32)), torch.randn(1, 1, 32, 32, requires_grad=True)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[b, h, i, j]

    call = functools.partial(tritoncp.flex_attention, score_mod=score)
    got, want = (
        torch.autograd.grad(f(*x).square().sum(), [*x, table])
        for f in (torch.compile(call, fullgraph=True, backend="aot_eager"), call)
    )
    torch.testing.assert_close(got, want)


@plain_torch
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("saved", ["matmuls", "attention", "both"])
def test_selective_ac(saved: str, compiled: bool, engine: str) -> None:
    ops = {"matmuls": [torch.ops.aten.mm.default], "attention": list(tritoncp.SAVE_OPS)}
    ops["both"] = ops["matmuls"] + ops["attention"]
    projection = torch.nn.Linear(32, 96)

    def layer(x: Tensor) -> Tensor:
        q, k, v = projection(x).unflatten(2, (6, 16)).transpose(1, 2).chunk(3, 1)
        return tritoncp.flex_attention(q, k, v).transpose(1, 2).flatten(2)

    def stored(x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, ops[saved])
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    x = torch.randn(2, 24, 32, requires_grad=True)
    call = torch.compile(stored, backend="aot_eager") if compiled else stored
    leaves = [x, projection.weight]
    got, want = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (call, layer))
    torch.testing.assert_close(got, want)
