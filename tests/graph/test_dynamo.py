"""Tests under torch.compile: one graph serves all masks, and no value of a mask or mod is constant in it."""

import functools
import gc
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tests.draws import by_turns
from tests.graph.compiled_calls import Compiled
from tritoncp import causal, create_block_mask, document, make_plan
from tritoncp import mods as tritoncp_mods
from tritoncp.call import autograd, traced
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.graph import constants
from tritoncp.graph.inputs import flatten_callable, rebuild
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")  # compiled code is outside the kernels

S, BLOCK = 64, 16


class Layer(torch.nn.Module):
    """Run attention between ops that the compiler can optimise."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.25))

    def forward(self, q, k, v, score_mod, mask):
        return tritoncp.flex_attention(q.sin(), k * self.scale, v, score_mod, mask, enable_gqa=True).cos()


def mask_mod(i):
    ids, window = torch.arange(S) // (5 + i), 4 + 2 * i

    def mod(b, h, q, kv):
        return (ids[q] == ids[kv]) & (q - kv < window) & (q >= kv)

    return mod


def score_of(bias, i):
    slope = 0.1 + 0.05 * i

    def score_mod(s, b, h, q, kv):
        return s + slope * bias[h] * (q - kv)

    return score_mod


KINDS = {
    "plan": lambda i: make_plan(create_block_mask(mask_mod(i), 1, 1, S, S, BLOCK_SIZE=BLOCK)),
    "mask": lambda i: create_block_mask(mask_mod(i), 1, 1, S, S, BLOCK_SIZE=BLOCK),
    "torch's": lambda i: torch_flex.create_block_mask(mask_mod(i), 1, 1, S, S, "cpu", BLOCK_SIZE=BLOCK),
}

MANY = 5


def tensors():
    return [torch.randn(2, heads, S, 8, requires_grad=True) for heads in (4, 2, 2)]


def gradients(loss, *of):
    return [loss.detach(), *torch.autograd.grad(loss, of)]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_masks_through_one_module_in_two_compilations(kind):
    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer()
    fast = torch.compile(layer, backend=counter, fullgraph=True)
    answers = []
    for i in range(MANY):
        x, bias = tensors(), torch.randn(4, requires_grad=True)
        mask, score_mod = KINDS[kind](i), score_of(bias, i)
        leaves = [*x, bias, layer.scale]
        want = gradients(layer(*x, score_mod, mask).square().sum(), *leaves)
        loss = fast(*x, score_mod, mask).square().sum()
        del mask, score_mod
        gc.collect()
        got = gradients(loss, *leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        answers.append(got[0].item())
    assert len(set(answers)) == MANY
    assert counter.frame_count <= 2


def test_a_plan_is_not_compiled_for_twice():
    """Masks of other kinds, balancers and numbers of blocks reuse the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(tritoncp.flex_attention, backend=counter, fullgraph=True)
    q, k, v = (torch.randn(1, 2, S, 8) for _ in range(3))
    table = torch.rand(S, S) < 0.3
    mods = [
        causal(),
        document(lengths=[10, 54]),
        lambda b, h, q, kv: table[q, kv],
        tritoncp.sliding_window(9),
    ]
    for block, mod in enumerate(mods):
        plan = make_plan(create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=8 << (block % 3)))
        assert torch.equal(fast(q, k, v, plan), tritoncp.flex_attention(q, k, v, plan))
    assert counter.frame_count == 1


@pytest.mark.long  # needs a C++ compiler
def test_inductor_against_the_oracle():
    layer = Layer().double()
    x, bias = [t.detach().double().requires_grad_() for t in tensors()], torch.randn(4, requires_grad=True)
    mask = KINDS["mask"](3)
    fast = torch.compile(layer, fullgraph=True)
    leaves = [*x, bias, layer.scale]
    got = gradients(fast(*x, score_of(bias, 0), mask).square().sum(), *leaves)
    q, k, v = x
    dense = dense_attention(q.sin(), k * layer.scale, v, mask, score_of(bias, 0)).out.cos()
    for a, b in zip(got, gradients(dense.square().sum(), *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_translated_mod_is_known_to_a_graph_after_calls_without_one():
    """Uncompiled calls of other mods of the same structure must not drop the structure that a graph needs."""
    q, k, v = (torch.randn(1, 2, S, 8) for _ in range(3))
    mod, plan = tritoncp_mods.score_mod(score_of(torch.randn(2), 9)), KINDS["plan"](3)
    want = tritoncp.flex_attention(q, k, v, mod, plan)
    fast = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(fast(q, k, v, mod, plan), want)


def test_a_graph_has_every_output_and_checks_positions():
    fast = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(1, 2, S, 8) for _ in range(3))
    plan = KINDS["plan"](3)
    aux = torch_flex.AuxRequest(lse=True, max_scores=True)
    out, more = fast(q, k, v, plan, scale=0.3, return_aux=aux, positions=torch.arange(S))
    want, same = tritoncp.flex_attention(q, k, v, plan, scale=0.3, return_aux=aux)
    assert torch.equal(out, want)
    assert all(map(torch.equal, more, same))
    assert torch.equal(fast(q, k, v, plan, scale=0.3, return_lse=True)[1], same.lse)
    with pytest.raises(ValueError, match="positions"):
        fast(q, k, v, plan, scale=0.3, return_aux=aux, positions=torch.arange(S).flip(0))


def attend(x, *rest, **options):
    return tritoncp.flex_attention(x, x, x, *rest, **options)


OPTIONS = {"ROUTE": "loops", "deterministic": True}
NUMBERS = {  # calls with a number n, and mods and masks that are made of it inside
    "scale": lambda x, n: attend(x, causal(), scale=n),
    "scale of a factor": lambda x, n: attend(x, lambda s, *_: s * n, scale=n + 1),
    "softcap": lambda x, n: attend(x, tritoncp.softcap(n)),
    "kernel option": lambda x, n: attend(x, kernel_options={"SPLIT_KV": n}),
    "kernel options": lambda x, n: attend(
        x, lambda s, *_: s * n, kernel_options={"SPLIT_KV": n, "num_stages": 1 + n % 8} | OPTIONS
    ),
    "batch_offset": lambda x, n: attend(x, lambda s, b, *_: s * b, batch_offset=n),
    "sliding_window": lambda x, n: attend(x, tritoncp.sliding_window(n, n + 1)),
    "prefix_lm": lambda x, n: attend(x, tritoncp.prefix_lm(n) & tritoncp.not_(causal())),
    "lengths": lambda x, n: attend(x, document(lengths=[n, S - n]) & causal()),
    "block mask": lambda x, n: attend(x, create_block_mask(tritoncp.prefix_lm(n), None, None, S, S)),
}


RARE = "scale", "softcap", "kernel option", "sliding_window"  # others have these numbers, and more


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dynamic"), by_turns(NUMBERS, (None, True), RARE))
def test_a_number_that_changes_compiles_at_most_twice(name, dynamic):
    """So many values do not reach Dynamo's limit of compilations."""
    takes_floats = name.startswith("s") and name != "sliding_window"
    case = Compiled(NUMBERS[name], dynamic=dynamic, backend="aot_eager" if takes_floats else "eager")
    x = torch.randn(1, 2, S, 8, requires_grad=takes_floats)
    for numbers in [(3, 5, 8, 13), *[(0.125, 0.25, 0.5)] * takes_floats]:
        before = case.counter.frame_count
        for n in numbers:
            out = case.check(x, n)
        assert case.counter.frame_count <= before + 2
    if takes_floats:
        grads = [torch.autograd.grad(y.square().sum(), x) for y in (out, NUMBERS[name](x, n))]
        torch.testing.assert_close(*grads)


@pytest.mark.long
def test_numbers_of_a_graph_are_checked_when_it_runs():
    fast = torch.compile(NUMBERS["kernel option"], backend="eager", fullgraph=True, dynamic=True)
    x = torch.randn(1, 2, S, 8)
    fast(x, 3)
    with pytest.raises(ValueError, match="SPLIT_KV=-3"):
        fast(x, -3)
    with pytest.raises(ValueError, match=r"lengths must be integers >= 0, .* got \[-2, 66\]"):
        torch.compile(NUMBERS["lengths"], backend="eager", fullgraph=True, dynamic=True)(x, -2)


def test_a_compiled_call_gets_the_kernel_options_that_it_was_passed(monkeypatch):
    seen = []
    forward = autograd.forward_pass
    monkeypatch.setattr(autograd, "forward_pass", lambda *args: seen.extend(args[0]) or forward(*args))
    fast = torch.compile(NUMBERS["kernel options"], backend="eager", fullgraph=True, dynamic=True)
    for n in (2, 3):
        fast(torch.randn(1, 2, S, 8), n)
        assert dict(seen[-1].options) == {"SPLIT_KV": n, "num_stages": 1 + n % 8} | OPTIONS


def test_documents_of_lengths_share_a_plan_and_may_leave_the_graph():
    tritoncp.plan_cache_clear()

    def layers(x, lengths):
        mask = document(lengths=lengths)
        return tritoncp.flex_attention(tritoncp.flex_attention(x, x, x, mask), x, x, mask), mask

    fast, x = torch.compile(layers, backend="aot_eager", fullgraph=True), torch.randn(1, 2, S, 8)
    lengths = torch.tensor([24, 40])
    for _ in range(2):
        out, mask = fast(x, lengths)
    assert tritoncp.plan_cache_info().misses == 1
    torch.testing.assert_close(out, layers(x, lengths)[0])
    own = document(lengths=lengths)
    for part in (causal(), lambda b, h, q, kv: q >= kv):
        outs = [tritoncp.flex_attention(x, x, x, mask & part) for mask in (mask, own)]
        assert torch.equal(*outs)


def test_arguments_are_checked_in_a_graph():
    fast = torch.compile(tritoncp.flex_attention, backend="eager")
    q, plan = torch.randn(1, 2, S, 8), KINDS["plan"](3)
    with pytest.raises(ValueError, match="unknown kernel option 'BLOCKS_M'"):
        fast(q, q, q, plan, kernel_options={"BLOCKS_M": 32})
    with pytest.raises(ValueError, match="query has 48 rows; rank 0's shard has 64"):
        fast(*[q[:, :, :48]] * 3, plan)
    with pytest.raises(ValueError, match="scale is a tensor that requires grad"):
        fast(q, q, q, plan, scale=torch.tensor(0.3, requires_grad=True))
    want = tritoncp.flex_attention(q, q, q, plan, scale=0.5)
    assert torch.equal(fast(q, q, q, plan, scale=torch.tensor(0.5)), want)  # outside of the graph


def test_inference_mode():
    fast = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(1, 2, S, 8) for _ in range(3))
    mask, bias = KINDS["mask"](3), torch.ones(2)
    with torch.inference_mode():  # the first to see this score_mod
        inside = [call(q, k, v, score_of(bias, 7), mask) for call in (fast, tritoncp.flex_attention)]
    want = tritoncp.flex_attention(q, k, v, score_of(bias, 7), mask)
    assert all(torch.equal(out, want) for out in inside)


def test_a_raw_mask_is_planned_once():
    tritoncp.plan_cache_clear()
    fast = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(1, 2, S, 8) for _ in range(3))
    mask = KINDS["torch's"](3)
    for _ in range(3):
        fast(q, k, v, mask)
    assert tritoncp.plan_cache_info().misses == 1


def test_edits_of_captures_are_seen():
    """The next call of the same graph uses edited captures; a backward pass after an edit raises an error."""
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(tritoncp.flex_attention, backend=counter, fullgraph=True)
    q, k, v = (torch.randn(1, 2, S, 8, requires_grad=True) for _ in range(3))
    ids, bias = torch.arange(S) // 9, torch.randn(2)
    mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], 1, 1, S, S, BLOCK_SIZE=BLOCK)

    def score_mod(s, b, h, q, kv):
        return s + bias[h] * (q - kv)

    before = fast(q, k, v, score_mod, mask)
    bias.mul_(2)
    assert not torch.allclose(before, fast(q, k, v, score_mod, mask))
    assert torch.equal(fast(q, k, v, score_mod, mask), tritoncp.flex_attention(q, k, v, score_mod, mask))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()
    late = fast(q, k, v, mask)
    ids.copy_(torch.arange(S) // 11)
    with pytest.raises(RuntimeError, match="edited in place after the plan was made"):
        late.sum().backward()
    with pytest.raises(RuntimeError, match="edited in place after the mask was made"):
        fast(q, k, v, mask)
    mask = create_block_mask(mask.mask_mod, 1, 1, S, S, BLOCK_SIZE=BLOCK)
    assert torch.equal(fast(q, k, v, mask), tritoncp.flex_attention(q, k, v, mask))
    assert counter.frame_count == 2  # with a score_mod, and without


def made_plan(q, mask):
    return tritoncp.flex_attention(q, q, q, make_plan(mask))


def made_translation(q, mask, score_mod):
    return tritoncp.flex_attention(q, q, q, tritoncp_mods.score_mod(score_mod), mask)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fn", [made_plan, made_translation])
def test_objects_made_in_a_compiled_function_break_the_graph(fn):
    rest = {"mask": KINDS["mask"](1), "score_mod": score_of(torch.ones(2), 1)}
    arguments = [rest[name] for name in fn.__code__.co_varnames[1 : fn.__code__.co_argcount]]
    q, counter = torch.randn(1, 2, S, 8), CompileCounterWithBackend("aot_eager")
    with pytest.raises(Exception, match=r"inside torch.compile.* outside the compiled function") as error:
        torch.compile(fn, backend="aot_eager", fullgraph=True)(q, *arguments)
    assert isinstance(error.value, torch._dynamo.exc.TorchDynamoException)
    assert torch.equal(torch.compile(fn, backend=counter)(q, *arguments), fn(q, *arguments))
    assert counter.frame_count <= 1


@pytest.mark.long
def test_a_mask_made_by_torch_in_a_graph_is_taken():
    def call(q):
        mask = torch_flex.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, "cpu")
        return tritoncp.flex_attention(q, q, q, mask)

    q = torch.randn(1, 2, S, 8)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q), call(q))


def test_opcheck_of_the_op_that_plans():
    for mask in (KINDS["torch's"](2), KINDS["plan"](2), None):
        captures, numbers = [], []
        structure = flatten_callable(mask, captures, numbers)
        opcheck(
            traced.plan_op,
            (captures, numbers, [1, 2, S, 8, 2, S], structure, "", None, None),
            test_utils=TESTS,
        )


# A handle is a new name each time: the two runs of test_aot_dispatch_dynamic differ in its value.
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_objects_that_graphs_name_are_bounded(monkeypatch):
    """A running graph keeps its objects; a graph that did not run while many others did says what to do."""
    monkeypatch.setattr("tritoncp.graph.constants._CONSTANTS", BoundedCache(16))
    monkeypatch.setattr("tritoncp.graph.constants._NAMES", BoundedCache(16))
    in_use, idle, *others = [eval(f"lambda b, h, q_idx, kv_idx: {n}") for n in range(32)]
    first, second = flatten_callable(in_use, [], []), flatten_callable(idle, [], [])
    for other in others:
        assert rebuild(first, [], [])(0, 0, 0, 0) == 0
        assert rebuild(flatten_callable(other, [], []), [], []).__code__ is other.__code__
    with pytest.raises(RuntimeError, match=r"torch\._dynamo\.reset"):
        rebuild(second, [], [])
    assert rebuild(flatten_callable(idle, [], []), [], [])(0, 0, 0, 0) == 1


NAMED = {
    "a mask_mod": mask_mod(1),
    "a score_mod": score_of(torch.ones(2), 1),
    "a closed form": causal() & document(lengths=[10, 54]),
    "a partial": functools.partial(made_translation, mask=None, score_mod=torch.tanh),
    "a method": Layer().forward,
}


@pytest.mark.parametrize("name", NAMED)
def test_a_graph_names_objects_so_that_another_process_finds_them(name, monkeypatch):
    """The other process has empty tables; code with another digest is not taken for the original."""
    thing = NAMED[name]
    text = flatten_callable(thing, tensors := [], ints := [])
    monkeypatch.setattr(constants, "_CONSTANTS", BoundedCache(1 << 15))
    monkeypatch.setattr(constants, "_NAMES", BoundedCache(1 << 15))
    other = rebuild(text, tensors, ints)
    assert "@" not in text and type(other) is type(thing)
    assert flatten_callable(other, [], []) == text
    digest = re.search("#[0-9a-f]{16}", text)
    if digest is not None:
        with pytest.raises(RuntimeError, match=r"of the module .*test_dynamo, which has no such code"):
            rebuild(text.replace(digest[0], f"#{0:016x}"), tensors, ints)


def test_a_graph_calls_nothing_that_only_its_text_names():
    """A saved program is not trusted with functions that are no masks."""
    for text in ('["call","builtins:dict",[]]', '["is","builtins:exec"]', '["is","os:system"]'):
        with pytest.raises((TypeError, RuntimeError), match=r"not made by tritoncp|no such code"):
            rebuild(text, [], [])
    text = flatten_callable(eval("lambda b, h, q, kv: q > kv + 77"), [], [])
    number = re.search("@([0-9]+)", text)[1]
    with pytest.raises(RuntimeError, match="no name by which another process could find it"):
        rebuild(text.replace(number, str(int(number) ^ 1)), [], [])
