"""Tests of roll: shards of the shifted global tensor, in simulated worlds, on real ranks and in graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tritoncp
from tests.multiprocess import ranks
from tests.planning.test_packer import forests
from tests.planning.test_placement import placements, random_mask
from tritoncp import roll, shard
from tritoncp.core import log_lines
from tritoncp.distributed import collectives
from tritoncp.planning import shifts
from tritoncp.planning.build import build

WHERE = {"dim": -3, "batch_dim": 2}


def shifted(x: Tensor, ids: list[int], shift: int, pad: float) -> Tensor:
    """Shift the first dimension of a tensor within documents, row by row."""
    out = torch.full_like(x, pad)
    for i, document in enumerate(ids):
        if 0 <= i - shift < len(ids) and ids[i - shift] == document:
            out[i] = x[i - shift]
    return out


@st.composite
def problems(draw: Callable) -> tuple[Any, Any, list[list[int]], int]:
    """Draw a world, a plan, the documents of each of two batch rows, and a shift."""
    world, length = draw(st.integers(1, 6)), draw(st.integers(1, 30))
    plan = draw(placements(world, length))
    steps = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    ids = [torch.tensor(draw(steps)).cumsum(0).tolist() for _ in range(2)]
    same = draw(st.booleans())
    return tritoncp.simulate(world), plan, [ids[0], ids[0] if same else ids[1]], draw(st.integers(-4, 4))


@pytest.mark.long
@given(problems(), st.sampled_from([torch.float64, torch.int64, torch.bool, torch.bfloat16]))
@settings(max_examples=80)
def test_rolled_shards_are_shards_of_the_shifted_tensor(problem, dtype: torch.dtype) -> None:
    world, plan, ids, shift = problem
    length = len(ids[0])
    x = torch.arange(1, 1 + length * 6).view(length, 3, 2).to(dtype)
    documents = torch.tensor(ids if ids[0] != ids[1] else ids[0])
    whole = torch.stack([shifted(x[..., row], ids[row], shift, 1) for row in (0, 1)], -1)
    shards = world.shard(x, plan, dim=0, batch_dim=2, pad=7 if dtype != torch.bool else 1)
    with mock.patch.object(collectives, "_run_all_to_alls", wraps=collectives._run_all_to_alls) as sends:
        rolled = roll(shards, plan, shift, world, documents=documents, **WHERE, pad=1)
    expected = world.shard(whole, plan, dim=0, batch_dim=2, pad=1)
    assert all(map(torch.equal, rolled, expected))
    owners = world_owners(world, plan, length)
    crossing = sum(
        int(owners[row, i - shift] != owners[row, i])
        for row in range(2 if plan.q.batch > 1 or ids[0] != ids[1] else 1)
        for i in range(length)
        if 0 <= i - shift < length and ids[row][i - shift] == ids[row][i]
    )
    rows = [sum(len(request.x) for request in call.args[0]) for call in sends.call_args_list]
    assert rows == ([crossing] if crossing else [])  # exactly the rows that cross ranks


def world_owners(world: Any, plan: Any, length: int) -> Tensor:
    """Return the rank of each position of each of two batch rows."""
    owners = torch.full((2, length), -1)
    for rank in range(world.world_size):
        for row, positions in enumerate(plan.for_rank(rank).positions.expand(2, -1)):
            owners[row, positions[positions >= 0]] = rank
    return owners


@given(problems())
@settings(max_examples=40)
def test_gradients_return_to_the_rows_that_they_belong_to(problem) -> None:
    world, plan, ids, shift = problem
    length = len(ids[0])
    x, y = torch.randn(2, length, 3, 2, dtype=torch.float64)
    documents = torch.tensor(ids)
    leaves = [part.requires_grad_() for part in world.shard(x, plan, dim=0, batch_dim=2)]
    rolled = roll(leaves, plan, shift, world, documents=documents, **WHERE)
    grads = torch.autograd.grad(rolled, leaves, world.shard(y, plan, dim=0, batch_dim=2), create_graph=True)
    back = torch.stack([shifted(y[..., row], ids[row], -shift, 0) for row in (0, 1)], -1)
    assert all(map(torch.equal, grads, world.shard(back, plan, dim=0, batch_dim=2)))
    seeds = [torch.randn_like(part).requires_grad_() for part in rolled]  # linear: grad of the grad is roll
    grads = torch.autograd.grad(rolled, leaves, seeds, create_graph=True)
    again = torch.autograd.grad(grads, seeds, [part.detach() for part in leaves])
    assert all(map(torch.equal, again, rolled))


@given(forests(), st.integers(0, 4), st.integers(1, 4), st.sampled_from(["ptrr", "contiguous", "locality"]))
@settings(max_examples=40)
def test_a_rolled_tree_equals_the_rolled_trajectories(forest, shift: int, size: int, balancer: str) -> None:
    """A token gets the row of the token before it on its path; its row's gradient is a sum over branches."""
    parents, lengths = forest
    if not sum(lengths):
        return
    mod, n = tritoncp.tree(parents, lengths), sum(lengths)
    world = tritoncp.simulate(size)
    plan = world.make_plan(tritoncp.create_block_mask(mod, 1, 1, n, n, BLOCK_SIZE=2), balancer=balancer)
    matrix = torch.zeros(n, n, dtype=torch.float64)  # the expected result, by one step on the path at a time
    for i, source in enumerate(shifts.token_ancestors(mod.depth.long(), 1).tolist()):
        if source >= 0:
            matrix[i, source] = 1
    matrix = torch.linalg.matrix_power(matrix, shift)
    x, y = torch.randint(-9, 9, (2, n, 3)).double()
    leaves = [part.requires_grad_() for part in world.shard(x, plan, dim=0)]
    rolled = roll(leaves, plan, shift, world, dim=0, documents=mod, batch_dim=None)
    assert torch.equal(world.unshard(rolled, plan, dim=0), matrix @ x)
    grads = torch.autograd.grad(rolled, leaves, world.shard(y, plan, dim=0))
    assert torch.equal(world.unshard(grads, plan, dim=0), matrix.T @ y)


def test_labels_of_further_tokens_equal_labels_of_the_whole_text() -> None:
    """Multi-token prediction: labels k tokens on, within documents, padding -100."""
    world, lengths = tritoncp.simulate(4), [100, 28, 200, 56]
    documents = tritoncp.document(lengths=lengths)
    mod = tritoncp.causal() & documents
    plan = world.make_plan(tritoncp.create_block_mask(mod, 1, 1, 384, 384, BLOCK_SIZE=16))
    text = torch.randint(0, 99, (1, 384))
    tokens = world.shard(text, plan, dim=1)
    for k in range(3):
        labels = roll(tokens, plan, -1 - k, world, dim=1, documents=documents, pad=-100)
        parts = [
            torch.nn.functional.pad(part[0, 1 + k :], (0, min(1 + k, len(part[0]))), value=-100)
            for part in text.split(lengths, 1)
        ]
        assert torch.equal(world.unshard(labels, plan, dim=1)[0], torch.cat(parts))


def test_float8_rows_keep_their_bits() -> None:
    world, plan = tritoncp.simulate(2), build(random_mask(2, 6, 4, 8, 5), 2)
    bits = torch.randint(0, 256, (2, 44), dtype=torch.uint8)
    shards = world.shard(bits.view(torch.float8_e4m3fn), plan, dim=1)
    rolled = roll(shards, plan, 3, world, dim=1)
    expected = torch.nn.functional.pad(bits[:, :-3], (3, 0))
    assert torch.equal(world.unshard(rolled, plan, dim=1).view(torch.uint8), expected)


def test_indices_are_computed_once_for_a_plan_documents_and_a_shift() -> None:
    world, lengths = tritoncp.simulate(3), torch.tensor([20, 44])
    plan, documents = world.make_plan(tritoncp.full_mask(64, 64, block=4)), tritoncp.document(lengths=lengths)
    shards = world.shard(torch.randn(64), plan, dim=0)
    with mock.patch("tritoncp.api.roll.shifted_documents", wraps=shifts.shifted_documents) as computed:
        for _ in range(3):
            for shift in (1, -1):
                roll([x.clone() for x in shards], plan, shift, world, dim=0, documents=documents)
                roll(shards, plan, shift, world, dim=0, documents=documents.ids)
                roll(shards, plan, shift, world, dim=0)
    assert computed.call_count == 6
    ids = documents.ids.clone()
    before = roll(shards, plan, 1, world, dim=0, documents=ids)
    ids[30:] += 1  # an edit makes another shift
    after = roll(shards, plan, 1, world, dim=0, documents=ids)
    assert not all(map(torch.equal, before, after))


# -- real ranks, and graphs -------------------------------------------------------------------------------

S = 44
LENGTHS = [[7, 1, 16, 20], [30, 2, 12, 0]]


def one_rank(group: Any, x: Tensor, y: Tensor) -> int:
    """Roll by plain and compiled calls; return the number of graphs."""
    plans = [
        build(mask, group.size()).for_rank(group.rank()).pinned()
        for mask in (random_mask(1, 11, 0, 4, 3), random_mask(2, 6, 4, 8, 5))
    ]
    counter = CompileCounterWithBackend("aot_eager")
    mods = [tritoncp.document(lengths=LENGTHS[0]), tritoncp.document(lengths=LENGTHS[1])]

    def call(part: Tensor, plan: Any, shift: int, documents: Any) -> Tensor:
        return roll(part * 2, plan, shift, group, dim=1, documents=documents, pad=3) + 1

    for function in (call, torch.compile(call, backend=counter, fullgraph=True)):
        for plan in plans:
            for shift in (1, -2):
                for documents in mods:
                    ids = documents.ids.tolist()
                    part = shard(x, plan, group, dim=1).requires_grad_()
                    out = function(part, plan, shift, documents)
                    whole = torch.stack([shifted(2 * row, ids, shift, 3) for row in x])
                    assert torch.equal(out.detach(), shard(whole, plan, group, dim=1, pad=3) + 1)
                    (grad,) = torch.autograd.grad(out, part, shard(y, plan, group, dim=1))
                    back = torch.stack([shifted(2 * row, ids, -shift, 0) for row in y])
                    assert torch.equal(grad, shard(back, plan, group, dim=1))
    fake = FakeTensorMode()
    with fake:
        part = torch.empty(part.shape, requires_grad=True)
    assert type(roll(part, plans[1], 1, group, dim=1)) is FakeTensor
    return counter.frame_count


@pytest.mark.long
def test_real_ranks_roll_plain_and_compiled_with_changing_documents() -> None:
    x, y = torch.randint(-9, 9, (2, 2, S, 3)).double()
    for graphs in ranks.run(2, one_rank, x, y):
        assert graphs <= 4, graphs  # for two sizes of shards, and a constant and a symbolic shift


def test_ranks_that_differ_raise_everywhere() -> None:
    def answers(group: Any) -> list[Any]:
        plan = build(random_mask(1, 11, 0, 4, 3), 2).for_rank(group.rank())
        part, first = shard(torch.arange(float(S)), plan, group, dim=0), group.rank() == 0
        return [ranks.attempt(lambda: roll(part, plan, 1 if first else 2, group, dim=0))]

    for (answer,) in ranks.run(2, answers):
        assert re.search("differ in plans: .*plan, documents and shift", answer), answer


def test_a_log_line_names_the_sent_rows_and_bytes(caplog: pytest.LogCaptureFixture) -> None:
    world = tritoncp.simulate(2)
    plan = world.make_plan(tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 8, 8, BLOCK_SIZE=2))
    shards = world.shard(torch.arange(8), plan, dim=0)
    with caplog.at_level("DEBUG", logger=log_lines.__name__.split(".")[0]):
        roll(shards, plan, -1, world, dim=0)
    assert "roll, rank 0: sends 1 of 4 rows, 8 bytes" in caplog.text


ERRORS = [
    ({"plan": None}, TypeError, "plan is a NoneType; a Plan is needed"),
    ({"shift": 1.5}, TypeError, "shift=1.5; an int is needed"),
    ({"dim": 3}, ValueError, "dim=3: the tensor .* has no such dimension"),
    ({"batch_dim": 5}, ValueError, "batch_dim=5: the tensor .* has no such dimension"),
    ({"x": [torch.zeros(8)]}, ValueError, "a list of 1 shards; 2 are needed"),
    (
        {"x": [torch.zeros(7)] * 2},
        ValueError,
        "rank 0's shard by the plan is needed, 8 rows along dimension 0",
    ),
    ({"documents": torch.zeros(9).long()}, ValueError, "documents is of 9 tokens, and the plan of 16"),
    ({"documents": tritoncp.causal()}, TypeError, "documents is causal.*pass a tensor of document indices"),
    ({"documents": torch.zeros(3, 16).long()}, ValueError, "batch_dim=0: the plans place 3 batch rows"),
    ({"x": [torch.zeros(8).byte()] * 2, "pad": -1}, ValueError, "pad=-1 is not a value of torch.uint8"),
    (
        {"documents": tritoncp.tree([-1, 0, 0], [8, 4, 4]), "shift": -1},
        ValueError,
        "token 7 of the tree has 2",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS, ids=lambda x: str(x)[:40])
def test_wrong_arguments_raise_with_the_remedy(wrong: dict, error: type[Exception], message: str) -> None:
    world = tritoncp.simulate(2)
    plan = world.make_plan(tritoncp.full_mask(16, 16, block=4))
    arguments = {"x": [torch.zeros(8)] * 2, "plan": plan, "shift": 1, "mesh": world, "dim": 0} | wrong
    with pytest.raises(error, match=message):
        roll(**arguments)
