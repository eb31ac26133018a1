"""Tests of score_mods and mask_mods that a function under torch.compile makes itself."""

from typing import NamedTuple

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import tritoncp
from tests.graph.compiled_calls import Compiled, S, attend, x_of

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")  # compiled code is outside the kernels

LEARNED = torch.ones(2, requires_grad=True)


@pytest.mark.long
def test_mods_made_inside_from_functions_compile_whole():
    def inside(x, name):
        act, half = getattr(torch, name), 0.5

        def inner(s):
            return act(s) * half

        return attend(x, lambda s, b, h, i, j, w=2.0: inner(s) * w)

    case = Compiled(inside)
    answers = [case.check(x_of(), name) for name in ("tanh", "sigmoid", "tanh")]
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])


@pytest.mark.long
def test_a_mod_made_in_a_graph_may_capture_lengths():
    def inside(x):
        half = x.shape[2] // 2
        return attend(x, lambda s, b, h, i, j: torch.where(i < half, s, 2 * s))

    case = Compiled(inside, dynamic=True, backend="eager")
    for length in (16, 32, 24):
        case.check(x_of()[:, :, :length])


class Pair(NamedTuple):
    scale: float
    shift: float


def by_default(a, b):
    return lambda s, batch, h, i, j, a=a, *, b=b: s * a + i * b


def by_tuple(a, b):
    pair = a, [b]
    return lambda s, batch, h, i, j: s * pair[0] + i * pair[1][0]


def by_named_tuple(a, b):
    pair = Pair(a, shift=b)
    return lambda s, batch, h, i, j: s * pair.scale + i * pair.shift


def by_nested_functions(a, b):
    scale = lambda s: s * a  # noqa: E731
    functions = scale, lambda s, i: s + i * b
    return lambda s, batch, h, i, j: functions[1](functions[0](s), i)


def by_size(a, b):
    size = torch.ones(2, 3).shape
    return lambda s, batch, h, i, j: s * a + i * b * size[1] * size.numel()


OTHERS = (by_tuple, by_named_tuple, by_nested_functions, by_size)


@pytest.mark.long
@pytest.mark.parametrize("of", [by_default, *(pytest.param(of, marks=pytest.mark.long) for of in OTHERS)])
@pytest.mark.parametrize("kind", [int, float])
def test_numbers_in_a_mod_made_in_a_graph_may_change(of, kind):
    case = Compiled(lambda x, a, b: attend(x, of(a, b)), backend="eager")
    for a, b in ((2, 3), (3, 5), (4, 6), (5, 7), (6, 7), (7, 2)):
        case.check(x_of(), kind(a), kind(b) / 4 if kind is float else b)
    assert case.counter.frame_count <= 3


@pytest.mark.long
def test_a_list_edited_between_calls_of_a_mod_made_inside():
    def inside(x, values):
        return attend(x, lambda s, b, h, i, j: s * values[0] + i * values[-1])

    case, values = Compiled(inside, backend="eager"), [1.0, 2.0]
    case.check(x_of(), values)
    values[0] = 3.0
    case.check(x_of(), values)
    values.append(5)
    case.check(x_of(), values)
    case.check(x_of(), (4.0, 6))


@pytest.mark.long
def test_functions_made_in_a_graph_may_be_masks():
    def inside(x, width):
        near = and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j < width)
        mask = tritoncp.create_block_mask(near, None, None, S, S, device="cpu")
        return tritoncp.flex_attention(x, x, x, block_mask=mask)

    case = Compiled(inside)
    for width in (3, 4, 5, 9):
        case.check(x_of(), width)
    assert case.counter.frame_count <= 2


def test_a_gradient_of_a_global_is_not_lost_in_functions_made_inside():
    def inside(x):
        pair = Pair(lambda s, h: s * LEARNED[h], 1)
        return attend(x, lambda s, b, h, i, j: pair.scale(s, h))

    with pytest.raises(torch._dynamo.exc.Unsupported, match="requires grad from a global"):
        torch.compile(inside, backend="eager", fullgraph=True)(x_of())
