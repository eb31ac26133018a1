"""Cases of torch's tests and attention-gym's mods that compile, trace or cast, and rows that mods reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import tritoncp
from tests.compat import gym_mods as gym
from tests.compat.dense import BF16, F32, F64, agree, answer, exact
from tests.compat.test_mods_as_laws import COMPILED, LAWS, verify
from tests.compat.test_torch_calls import causal, check, tensors
from tests.compat.torch_mods import Dims, Form, normal, plain

pytestmark = pytest.mark.usefixtures("cpu_engine")  # unless a test asks for "engine"

# -- operations and reductions --------------------------------------------------------------------------

DISTANCE = Form(
    lambda t, scale: (
        lambda s, b, h, q, kv: torch.exp(-(t[q] - t[kv]).pow(2).sum(-1).add(1e-6).sqrt() / scale[h]) * s
    ),
    lambda d: [normal(d.q, 3), torch.logspace(0.001, 0.1, d.heads, dtype=F64)],
)
SCORES = {
    "trig": plain(lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.tan(b)),
    "trig twice": plain(lambda s, b, h, q, kv: torch.cos(s) * torch.sin(s) + torch.tan(b)),
    "tan": plain(lambda s, b, h, q, kv: torch.tan(s / 4)),
    "sum of a captured row": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b].sum(-1), lambda d: [normal(d.batch, 8)]
    ),
    "distance of captured rows": DISTANCE,
    "dot product of captured rows": Form(
        lambda t, u: lambda s, b, h, q, kv: s + 0.3 * torch.dot(t[b, h, q], u[b, h // 2, kv]),
        lambda d: [normal(d.batch, d.heads, d.q, 8), normal(d.batch, 1, d.keys, 8)],
    ),
}


COMBINATIONS = [
    pytest.param(engine, dtype, learned, marks=[pytest.mark.long] * (engine == "kernels" and not sample))
    for engine, dtype, learned in product(("cpu", "kernels"), (F32, BF16), (False, True))
    for sample in [dtype == F32 and learned]
]


@pytest.mark.parametrize(("engine", "dtype", "learned"), COMBINATIONS, indirect=["engine"], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, dtype: torch.dtype, learned: bool, engine: str) -> None:
    """aot_eager_gradcheck (trig, trig2), captured_reduction, reduction_unrolled, MLA's rope term."""
    dims, form = Dims(2, 2, 33), SCORES[name]
    x = tensors(dims, dtype)
    bound = [t.to(F32).requires_grad_(learned and t.is_floating_point()) for t in form.captured(dims)]
    out, lse = tritoncp.flex_attention(*x, form.bind(*bound), return_lse=True)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    want = exact(x, form.bind, bound, None, start)
    agree(answer(out, lse, [*x, *(t for t in bound if t.requires_grad)], start), want, dtype)


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
def test_a_long_reduction_names_its_remedy(engine: str) -> None:
    """cant_lower_error_message."""
    means = torch.randn(64, 256)
    with pytest.raises(Exception, match=r"unroll|fold"):
        tritoncp.flex_attention(
            *tensors(Dims(1, 2, 64)), lambda s, b, h, q, kv: s * (means[q] - means[kv]).pow(2).sum(-1)
        )


def test_a_mod_made_in_the_graph_around_tensors_is_refused_with_a_remedy() -> None:
    """inputs_are_realized under fullgraph=True, which torch takes: a row of docs/compatibility.md."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = q.sum(3)
        return tritoncp.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[b, h, i])

    with pytest.raises(Exception, match="outside the compiled function"):
        torch.compile(layer, fullgraph=True, backend="eager")(*tensors(Dims(1, 2, 32)))


# -- calls ----------------------------------------------------------------------------------------------


def test_the_empty_block_mask_masks_nothing(engine: str) -> None:
    """strided_inputs passes it; torch's own default for no mask."""
    x = tensors(Dims(1, 2, 33, kv=40))
    mask = torch_flex._create_empty_block_mask(x[0], x[1])
    check(functools.partial(tritoncp.flex_attention, block_mask=mask, return_lse=True), x)


class Hide(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, visible: Tensor) -> Tensor:
        return torch.where(visible, score, -torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", ["function", "cell"])
def test_autograd_function_in_a_compiled_score_mod(kind: str, fullgraph: bool) -> None:
    """autograd_function_in_score_mod."""
    own = Hide

    def of_cell(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return own.apply(s, q <= kv)

    def of_global(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return Hide.apply(s, q <= kv)

    score = of_cell if kind == "cell" else of_global
    call = functools.partial(tritoncp.flex_attention, score_mod=score, return_lse=True)
    x = tensors(Dims(1, 2, 32))
    check(torch.compile(call, fullgraph=fullgraph, backend="eager"), x, None, lambda b, h, q, kv: q <= kv)


class Shifted:
    """A bound method and a callable object."""

    def __init__(self) -> None:
        self.bias = torch.tensor([0.5, -1.0])

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * self.bias[h]

    def method(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * self.bias[h]


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", ["method", "object"])
def test_methods_and_objects_compile(kind: str, fullgraph: bool) -> None:
    shifted = Shifted()
    score = shifted.method if kind == "method" else shifted
    call = functools.partial(tritoncp.flex_attention, score_mod=score, return_lse=True)
    x = tensors(Dims(1, 2, 32))
    check(torch.compile(call, fullgraph=fullgraph, backend="eager"), x, Form(lambda: score))


def test_a_mod_made_in_the_graph_around_constants() -> None:
    """aot_eager_gradcheck, return_aux: a lambda in the compiled function, whole."""

    def layer(q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
        return tritoncp.flex_attention(
            q, k, v, lambda s, b, h, i, j: s * factor, return_aux=AuxRequest(lse=True)
        )

    call = torch.compile(functools.partial(layer, factor=2.0), fullgraph=True, backend="eager")

    def results(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = call(*x)
        return out, aux.lse

    check(results, tensors(Dims(1, 2, 32)), plain(lambda s, b, h, i, j: s * 2.0))


def test_a_named_tuple_in_a_closure_keeps_its_names() -> None:
    """The mask_mod's cell arrives in the graph as a plain tuple: AttributeError where it is called."""
    dims = Dims(1, 2, 32)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= dims.q // 4)

    mask = create_block_mask(mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    call = functools.partial(tritoncp.flex_attention, block_mask=mask, return_lse=True)
    check(torch.compile(call, fullgraph=True, backend="eager"), tensors(dims), None, mod)


def test_make_fx_on_fake_tensors() -> None:
    """subgraph_respect_decompostion, without the text of torch's graph."""
    x = [t.detach() for t in tensors(Dims(1, 2, 32))]
    graph = make_fx(lambda *x: tritoncp.flex_attention(*x, causal_mask), tracing_mode="fake")(*x)
    torch.testing.assert_close(graph(*x), tritoncp.flex_attention(*x, causal_mask))
    with FakeTensorMode() as mode:
        assert tritoncp.flex_attention(*(mode.from_tensor(t) for t in x)).shape == x[0].shape


causal_mask = tritoncp.create_block_mask(causal, None, None, 32, 32)


def test_autocast_takes_mixed_dtypes() -> None:
    q, k, v = tensors(Dims(1, 2, 32))
    with torch.autocast("cpu", dtype=BF16):
        out = tritoncp.flex_attention(q, k.to(BF16), v)
    assert out.dtype == BF16


# -- masks ----------------------------------------------------------------------------------------------


def test_masks_have_shape_and_numel() -> None:
    """block_mask_attributes."""
    mask = tritoncp.create_block_mask(causal, 4, 2, 2048, 2048)
    assert tuple(mask.shape) == (4, 2, 2048, 2048) and mask.ndim == 4 and mask.numel() == 4 * 2 * 2048 * 2048
    assert mask.to("cpu").sparsity() == mask.sparsity()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_create_block_mask(fullgraph: bool) -> None:
    """compiling_create_block_mask, make_block_mask, inspect_bug, dynamic_shapes_bug_dynamic_batch."""
    numbers = torch.arange(512) // 127

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (numbers[q] == numbers[kv])

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = tritoncp.create_block_mask(mod, None, None, q.shape[2], k.shape[2], BLOCK_SIZE=16)
        return tritoncp.flex_attention(q, k, v, mask, return_lse=True)

    call = torch.compile(layer, fullgraph=fullgraph, backend="eager")
    check(call, tensors(Dims(1, 2, 32)), None, mod)


# -- mods that capture functions ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", [name for name in LAWS if name not in COMPILED])
def test_mods_that_capture_functions_compile_whole(name: str, engine: str) -> None:
    verify(name, lambda call: torch.compile(call, fullgraph=True, backend="eager"))


class Tanh(torch.autograd.Function):
    """A hyperbolic tangent with a backward pass of its own, as the approximate one of attention-gym."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@pytest.mark.parametrize(
    "wrap",
    [lambda call: call, lambda call: torch.compile(call, fullgraph=True, backend="eager")],
    ids=["plain", "compiled"],
)
def test_softcap_by_an_autograd_function(wrap: Callable[[Any], Any]) -> None:
    score = gym.softcap(3.0, Tanh.apply)
    call = wrap(functools.partial(tritoncp.flex_attention, score_mod=score, return_lse=True))
    check(call, tensors(Dims(1, 2, 32)), Form(lambda: gym.softcap(3.0)))
