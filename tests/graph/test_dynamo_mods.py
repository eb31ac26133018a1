"""Tests of score_mods and mask_mods that torch.compile can put in a graph, or that break the graph."""

import functools
import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import tritoncp
from tests.graph.compiled_calls import Compiled, attend, x_of
from tritoncp.mods import Untranslatable

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")  # compiled code is outside the kernels


class Cap(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
        self.register_buffer("shift", torch.tensor([0.1, 0.2]))
        self.cap, self.unread = 2.0, object()
        self.act = torch.nn.Tanh()

    def learned(self, s, b, h, i, j):
        return s * self.slopes[h] + self.shift[h]

    def plain(self, s, b, h, i, j):
        return self.cap * torch.tanh(s / self.cap)

    def through_method(self, s, b, h, i, j):
        return self.plain(self.act(s), b, h, i, j) if self.half else s

    @property
    def half(self):
        return self.cap / 2


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Cap()

    def deep(self, s, b, h, i, j):
        return s + self.attn.slopes[h] * self.attn.cap * (i - j)


class Callable:
    def __init__(self):
        self.factor = 2.0

    def __call__(self, s, b, h, i, j):
        return s * self.factor


class Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Negated(Scaled):
    @staticmethod
    def forward(x):
        return -x

    @staticmethod
    def backward(ctx, g):
        return -g


def around(value):
    """Mods that capture a value in a closure, and use it as a function, a dict or an object."""

    def call(s, b, h, i, j):
        return value(s)

    def item(s, b, h, i, j):
        return value["cap"] * s

    def attribute(s, b, h, i, j):
        return value.cap * s

    def apply(s, b, h, i, j):
        return value.apply(s)

    return {"call": call, "item": item, "attribute": attribute, "apply": apply}


class Config:
    cap = 3.0


def with_keyword(s, b, h, i, j, *, w=2.0):
    return s * w


MODS = {
    "method of parameters": lambda: Cap().learned,
    "method of numbers": lambda: Cap().plain,
    "method of methods": lambda: Cap().through_method,
    "method of a submodule": lambda: Outer().deep,
    "callable object": Callable,
    "tanh": lambda: around(torch.tanh)["call"],
    "silu": lambda: around(F.silu)["call"],
    "partial of a builtin": lambda: functools.partial(lambda f, s, b, h, i, j: f(s), torch.tanh),
    "keyword": lambda: with_keyword,
    "dict": lambda: around({"cap": 2.0, "other": object()})["item"],
    "dict of tensors": lambda: around({"cap": torch.tensor(2.0)})["item"],
    "object": lambda: around(Callable())["call"] and around(Config())["attribute"],
    "class": lambda: around(Config)["attribute"],
    "stateless module": lambda: around(torch.nn.Tanh())["call"],
    "module of numbers": lambda: around(torch.nn.LeakyReLU(0.3))["call"],
    "module of modules": lambda: around(torch.nn.Sequential(torch.nn.LeakyReLU(0.3)))["call"],
    "autograd function": lambda: around(Scaled)["apply"],
    "apply of an autograd function": lambda: around(Scaled.apply)["call"],
    "method of a torch module": lambda: around(torch.nn.LeakyReLU(0.3).forward)["call"],
    "function of functions": lambda: around(lambda s: around(torch.sigmoid)["call"](s, 0, 0, 0, 0))["call"],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", MODS)
def test_mods_made_outside_compile_whole(kind):
    """Each is one graph, and its value and gradients equal the plain call."""
    mod = MODS[kind]()
    case = Compiled(attend)
    x = x_of().requires_grad_()
    out = case.check(x, mod)
    want = torch.autograd.grad(attend(x, mod).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), want, rtol=1e-5, atol=1e-5)
    assert case.counter.frame_count == 1


@pytest.mark.long
def test_parameters_of_a_method_get_gradients():
    for model, mod in ((cap := Cap(), cap.learned), (outer := Outer(), outer.deep)):
        slopes = next(model.parameters())
        case = Compiled(lambda x, mod=mod: attend(x, mod))
        got = torch.autograd.grad(case.check(x_of()).square().sum(), slopes)
        want = torch.autograd.grad(attend(x_of(), mod).square().sum(), slopes)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert case.counter.frame_count == 1


@pytest.mark.long
def test_edits_of_what_a_mod_reads_are_seen():
    """An edited number, tensor, function, dictionary entry or object changes the next call."""
    x, cap, outer = x_of(), Cap(), Outer()
    table, holder = {"cap": 2.0}, Callable()
    by_table = around(table)["item"]

    def holder_call(s, b, h, i, j):
        return holder(s, b, h, i, j)

    for mod, edits in {
        cap.plain: [lambda: setattr(cap, "cap", 3.5), lambda: setattr(cap, "cap", 1)],
        cap.learned: [
            lambda: cap.slopes.data.mul_(2),
            lambda: setattr(cap, "slopes", torch.nn.Parameter(torch.tensor([3.0, 1.0]))),
        ],
        cap.through_method: [
            lambda: setattr(cap, "act", torch.nn.Sigmoid()),
            lambda: setattr(cap, "cap", 9.0),
        ],
        outer.deep: [lambda: setattr(outer.attn, "cap", 0.25), lambda: setattr(outer, "attn", Cap())],
        by_table: [lambda: table.update(cap=5.0), lambda: table.update(cap=torch.tensor(7.0))],
        holder_call: [lambda: setattr(holder, "factor", 0.5)],
    }.items():
        torch._dynamo.reset()  # all lambdas share their code
        case = Compiled(lambda x, mod=mod: attend(x, mod), backend="eager")
        results = [case.check(x)]
        for edit in edits:
            edit()
            results.append(case.check(x))
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(results)), mod


@pytest.mark.long
def test_another_function_in_a_closure_is_another_graph():
    case, x = Compiled(attend), x_of()
    functions = torch.tanh, F.silu, torch.tanh, torch.nn.LeakyReLU(0.5), torch.nn.LeakyReLU(0.1), Scaled.apply
    answers = [case.check(x, around(f)["call"]) for f in (*functions, Negated.apply)]
    assert torch.equal(answers[0], answers[2])
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(answers))
    assert case.counter.frame_count <= len(set(functions)) + 1


def test_objects_of_one_class_share_a_graph():
    """Parameters are inputs, so that layers do not compile again for each other's objects."""
    case, x = Compiled(attend), x_of()
    layers = [Cap() for _ in range(4)]
    for scale, layer in enumerate(layers):
        layer.slopes.data.mul_(scale + 1)
    answers = [case.check(x, layer.learned) for layer in layers]
    assert case.counter.frame_count == 1
    assert not torch.equal(answers[0], answers[1])


def around_a_tensor(x):
    weight = x.mean()
    return attend(x, lambda s, b, h, i, j: s * weight)


def around_an_object(x):
    made = Callable()
    return attend(x, lambda s, b, h, i, j: made(s, b, h, i, j))


def scaled_by(factor):
    return lambda s: s * factor


SCALES = {"half": scaled_by(0.5), "double": scaled_by(2.0)}


def around_a_closure(x, name="half"):
    scale = SCALES[name]
    return attend(x, lambda s, b, h, i, j: scale(s))


@pytest.mark.long
def test_a_closure_in_a_mod_made_inside_is_not_taken_for_another():
    case = Compiled(around_a_closure)
    answers = [case.check(x_of(), name) for name in ("half", "double")]
    assert not torch.equal(*answers)


def test_a_tensor_of_the_graph_in_a_mod_made_inside_gets_its_gradient():
    x = x_of().requires_grad_()
    out = Compiled(around_a_tensor).check(x)
    want = torch.autograd.grad(around_a_tensor(x).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), want, rtol=1e-5, atol=1e-5)


LEARNED = torch.ones(2, requires_grad=True)


def of_a_global(x):
    return attend(x, lambda s, b, h, i, j: s * LEARNED[h])


class Counting:
    """A mod that edits its state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, s, b, h, i, j):
        self.calls += 1
        return s * 2


COUNTING = Counting()


def with_state(x):
    return attend(x, COUNTING)


HOOKED = torch.nn.Tanh()
HOOKED.register_forward_hook(lambda module, arguments, out: out * 2)
HOOKED_MOD = around(HOOKED)["call"]


def with_hooks(x):
    return attend(x, HOOKED_MOD)


NAME = "cap"


def by_name(s, b, h, i, j):
    return s * getattr(Config, NAME)


def with_getattr(x):
    return attend(x, by_name)


OUTSIDE = "outside the compiled function"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fn", "graphs", "reason"),
    [
        (around_an_object, 1, f"made inside torch.compile; make it {OUTSIDE}"),
        (of_a_global, 2, r"reads a tensor \(2,\) that requires grad from a global"),
        (with_state, 2, "edits state"),
        (with_hooks, 2, "hooks"),
        (with_getattr, 2, r"calls getattr\(\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_mods_break_the_graph(fn, graphs, reason, caplog):
    """There is at most one graph before and one after the call, and no code of tritoncp is traced; a global
    tensor gets its gradient too. With fullgraph an error gives the reason and the remedy. After the break
    `attend` gets the result of ``fn`` from outside."""
    x = x_of().requires_grad_()
    case = Compiled(fn, fullgraph=False)
    with caplog.at_level(logging.WARNING):
        out = case.check(x)
    assert case.counter.frame_count == graphs
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    got, want = (
        torch.autograd.grad(result.square().sum(), (x, LEARNED), materialize_grads=True)
        for result in (out, fn(x))
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s){reason}"):
        Compiled(fn).fast(x)


@pytest.mark.long
def test_flex_attention_compiled_itself():
    """`torch.compile(flex_attention)` is a graph, or runs as plain Python if a graph is impossible."""
    for mod, graphs in ((Cap().learned, 1), (COUNTING, 0)):
        counter = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(tritoncp.flex_attention, backend=counter)
        x = x_of()
        assert torch.equal(fast(x, x, x, mod), tritoncp.flex_attention(x, x, x, mod))
        assert counter.frame_count == graphs
        torch._dynamo.reset()


MISTAKES = {
    "returns torch.bool; a score_mod must return a number": lambda s, b, h, i, j: i >= j,
    r"takes \(b, h, i\); a mask_mod takes": lambda b, h, i: i,
    "must not write to what it captures": lambda s, b, h, i, j: (TABLE.add_(1), s)[1],
}
TABLE = torch.zeros(2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_score_mod_is_named_inside_graphs_too(text, engine):
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        with pytest.raises((TypeError, Untranslatable), match=text):
            call(x_of(), MISTAKES[text])
    assert not TABLE.any()
