"""Masks as arguments of traced and exported programs, and masks that such programs make."""

import itertools

import pytest
import torch
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import tritoncp
from tests.containers.samples import IDS, SAMPLES, S, attend, x_of
from tritoncp import causal, create_block_mask, document, flex_attention, make_plan

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")


class Masked(torch.nn.Module):
    """Attention with a mask among the arguments."""

    def forward(self, x, mask):
        return attend(x, mask)


TRACES = {
    "export": lambda module, *x: export(module, x, strict=False).module(),
    "strict export": lambda module, *x: export(module, x, strict=True).module(),
    **{
        mode: lambda module, *x, mode=mode: make_fx(module, tracing_mode=mode)(*x)
        for mode in ("real", "fake", "symbolic")
    },
}
OTHERS = {  # masks of the same structure as samples
    "documents": lambda: document(ids=IDS // 2),
    "and": lambda: causal() & document(lengths=[30, 34]),
    "mask": lambda: create_block_mask(causal(), 1, 1, S, S),
    "mask with a capture": SAMPLES["mask of a function"],
    "plan": lambda: make_plan(create_block_mask(causal(), 1, 1, S, S)),
    "dict of plans": lambda: dict.fromkeys(
        ("full", "near"), make_plan(create_block_mask(causal(), 1, 1, S, S))
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("trace", TRACES)
def test_a_traced_program_takes_masks_as_arguments(trace):
    """One program serves all masks of a structure; it never keeps the mask of the example.

    Each tracer takes half of the masks, and each mask is taken by two tracers at least.
    """
    turn = [*TRACES].index(trace)
    for name, other in itertools.islice(itertools.cycle(OTHERS.items()), turn, turn + len(OTHERS) // 2):
        program = TRACES[trace](Masked(), x_of(), SAMPLES[name]())
        for mask in (SAMPLES[name](), other()):
            assert torch.equal(program(x_of(1), mask), attend(x_of(1), mask)), name


def test_other_closed_forms_are_arguments_too():
    for name in ("causal", "window", "prefix", "prefixes", "or", "not", "selection", "tree", "varlen"):
        mask = SAMPLES[name]()
        program = export(Masked(), (x_of(), mask), strict=False).module()
        assert torch.equal(program(x_of(1), mask), attend(x_of(1), mask)), name


def test_an_argument_of_a_traced_program_has_no_attributes_yet():
    """The error says so, not that a tensor has no value."""

    def forward(x, mask):
        return x * mask.sparsity()

    with pytest.raises(AttributeError, match="of a Mask that a traced program gets is only known when the"):
        make_fx(forward, tracing_mode="fake")(x_of(), SAMPLES["mask"]())


class Makes(torch.nn.Module):
    """Attention with a mask that is made inside, for the length of the input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, ids):
        return flex_attention(x, x, x, block_mask=self.make(x.shape[2], ids))


MADE = {
    "closed form": lambda n, ids: create_block_mask(causal(), None, None, n, n),
    "documents": lambda n, ids: create_block_mask(causal() & document(ids=ids), None, None, n, n),
    "function": lambda n, ids: create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, n, n, BLOCK_SIZE=16
    ),
}
LENGTHS = {2: Dim("S", min=8, max=512)}, {0: Dim("S", min=8, max=512)}
GROWING = {
    "export": lambda module, *x: export(module, x, dynamic_shapes=LENGTHS, strict=False).module(),
    "strict export": lambda module, *x: export(module, x, dynamic_shapes=LENGTHS, strict=True).module(),
    "symbolic": TRACES["symbolic"],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("trace", [*TRACES, *(f"growing {name}" for name in GROWING)])
def test_a_mask_made_inside_a_graph_uses_the_values_of_each_run(trace):
    """Runs have other documents, and another length if lengths are dynamic."""
    name, is_growing = trace.removeprefix("growing "), trace.startswith("growing")
    for kind, make in MADE.items():
        module = Makes(make)
        program = (GROWING if is_growing else TRACES)[name](module, x_of(), IDS)
        for length in (S, 48) if is_growing else (S,):
            x, ids = torch.randn(1, 2, length, 8), torch.arange(length) // 7
            assert torch.equal(program(x, ids), module(x, ids)), kind


def test_masks_and_plans_that_a_trace_cannot_make_say_what_to_do():
    full = Makes(lambda n, ids: tritoncp.full_mask(n, n))
    with pytest.raises(TypeError, match="call create_block_mask there, or pass block_mask=None"):
        GROWING["export"](full, x_of(), IDS)
    planned = Makes(lambda n, ids: make_plan(create_block_mask(causal(), None, None, n, n)))
    with pytest.raises(RuntimeError, match="make its plan before the call"):
        GROWING["export"](planned, x_of(), IDS)
