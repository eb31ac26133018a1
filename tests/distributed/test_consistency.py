"""Consistency checks between ranks, on real gloo processes: ranks agree about a plan, or every rank raises an
error that names the difference."""

from __future__ import annotations

import inspect
import re
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tests.api.test_parallel import FlexAttention
from tests.call.test_expand import expand_latent, inputs
from tests.multiprocess.ranks import attempt, run
from tritoncp import causal, document, flex_attention, full_mask, make_plan
from tritoncp.distributed import consistency
from tritoncp.planning import SCHEDULES

S = 32
IDS = torch.arange(S) // 5

pytestmark = pytest.mark.usefixtures("cpu_engine")


def mask(mod=None, length=S):
    mod = causal() if mod is None else mod
    return tritoncp.create_block_mask(mod, 1, 1, length, length, BLOCK_SIZE=8)


def q(rows=S // 2, **options):
    return torch.zeros(1, 2, rows, 16, **options)


def other_ids(rank):
    ids = IDS.clone()
    ids[-1] += rank
    return ids


def plan(mod, group):
    return make_plan(mask(mod), group)


def attend(mod, group):
    return flex_attention(q(), q(), q(), mask(mod), group)


def plan_by_torch(version, group):
    with mock.patch.object(consistency, "versions", return_value=consistency.fact(f"torch {version}")):
        return plan(None, group)


def deal(rank, group):
    def mixed(blocks):
        return [range(len(blocks.costs)), []][:: 1 - 2 * rank]

    return make_plan(mask(), group, balancer=mixed)


CODE = (lambda b, h, q, kv: q > kv), (lambda b, h, q, kv: q >= kv)


def negated(latent, *arguments):
    key, value = expand_latent(latent, *arguments)
    return -key, value


def expand(rank, group):
    x = inputs(8, dtype=torch.float32)
    ring = make_plan(full_mask(16, 16, block=4), group, schedule="ring")
    expand = (expand_latent, negated)[rank], *x[2:4], 2
    return flex_attention(*x[:2], None, ring, group, enable_gqa=True, expand=expand)


# By name: the field in the message, the call of a rank, and the values of ranks 0 and 1 in it.
DIFFERENT = {
    "tensor": ("mask", lambda rank, group: plan(document(ids=other_ids(rank)), group), ("Mask(B=1",) * 2),
    "raw": ("mask", lambda rank, group: attend(document(ids=other_ids(rank)), group), ("document(",) * 2),
    "number": (
        "mask",
        lambda rank, group: attend(tritoncp.sliding_window(3 + rank), group),
        ("sliding_window(3", "sliding_window(4"),
    ),
    "code": ("mask", lambda rank, group: plan(CODE[rank], group), ("Mask(B=1",) * 2),
    "captured number": (
        "mask",
        lambda rank, group: plan(lambda b, h, q, kv: q - kv < 4 + rank, group),
        ("rank = 0", "rank = 1"),
    ),
    "options": (
        "options",
        lambda rank, group: make_plan(mask(), group, balancer=["ptrr", "head_tail"][rank]),
        ("'ptrr'", "'head_tail'"),
    ),
    "options, mask and placement": (
        "options",
        lambda rank, group: make_plan(mask(CODE[rank]), group, balancer=["ptrr", "head_tail"][rank]),
        ("'ptrr'", "'head_tail'"),
    ),
    "placement": ("placement", deal, ("balancer='mixed'",) * 2),
    "versions": ("versions", plan_by_torch, ("torch 0", "torch 1")),
    "expand": ("expand", expand, ("", "")),
    "call": ("call", lambda rank, group: (plan, attend)[rank](None, group), ("", "")),
}


@pytest.mark.long
@pytest.mark.bar(18)
def test_a_difference_is_named_on_every_rank():
    """Each in a group of its own."""

    def work(group):
        texts = []
        for _, call, _ in DIFFERENT.values():
            own = torch.distributed.new_group()
            texts.append(attempt(partial(call, group.rank(), own)))
        closed = attempt(lambda: plan(None, own))  # calls of the last kind differ in their kind
        assert re.match("GroupClosed: .*the ranks differ in call", closed, re.DOTALL)
        return texts

    for texts in run(2, work):
        for (name, (field, _, values)), text in zip(DIFFERENT.items(), texts, strict=True):
            assert text.startswith(f"Disagreement: the ranks differ in {field}: rank 0 against rank 1"), text
            for rank, value in enumerate(values):
                assert re.search(rf"Rank {rank} has .*{re.escape(value)}", text), text
            assert len(set(re.findall(r"\(digest [0-9a-f]{8}\)", text))) == text.count("(digest "), text
            assert field != "mask" or "Every rank needs the same global mask" in text
            assert "They differ in  too" not in text
            if name == "options, mask and placement":
                assert "They differ in mask, placement too." in text


@pytest.mark.long
def test_the_same_call_of_all_ranks_raises_nothing():
    def work(group):
        for _, call, _ in DIFFERENT.values():
            call(0, group)
        table = torch.arange(S) + 0
        bm = torch_block_mask(lambda b, h, q, kv: kv <= table[q], 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
        return make_plan(bm, group).rank

    assert run(2, work) == [0, 1]


def shifted(n):
    table = torch.arange(2.0 * S + n)
    return lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + n].sin()


def test_ranks_that_have_seen_other_integers_still_agree():
    """Whether an integer in an index is a constant depends on the calls before. Ranks compare neither."""

    def rank_of_two(group):
        x = torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(0))
        if group.rank():  # alone
            flex_attention(x, x, x, shifted(S), mask())
        plan = make_plan(mask(), mesh=group)
        shards = [tritoncp.shard(x, plan, group, dim=2) for _ in range(3)]
        outs = [flex_attention(*shards, shifted(n), plan, mesh=group) for n in (S + 1, S + 3, S, S + 4)]
        return [tritoncp.unshard(out, plan, group, dim=2) for out in outs]

    x = torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(0))
    for results in run(2, rank_of_two):
        for n, result in zip((S + 1, S + 3, S, S + 4), results, strict=True):
            torch.testing.assert_close(result, flex_attention(x, x, x, shifted(n), mask()))


def test_lengths_that_do_not_add_up_raise_on_all_ranks():
    def work(group):
        local = mask(length=S // 2)
        short = q(12) if group.rank() else q()
        return [
            attempt(lambda: flex_attention(q(), q(), q(), local, group)),
            attempt(lambda: flex_attention(short, short, short, mask(), group)),
        ]

    for first, second in run(2, work):
        assert "[16, 16] rows long, 32 together, the mask is for 16" in first
        assert "[16, 12] rows long, 28 together, the mask is for 32" in second


def test_a_mesh_is_a_group():
    def work(group):
        flat = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        flex_attention(q(), q(), q(), causal(), flat)
        flex_attention(q(), q(), q(), None, causal(), mesh=flat["cp"])
        wrong = make_plan(mask(), group).for_rank(1 - group.rank())
        return (
            attempt(lambda: flex_attention(q(), q(), q(), make_plan(mask(), world_size=3), group)),
            attempt(lambda: flex_attention(q(), q(), q(), wrong, group)),
        )

    for rank, (size, owner) in enumerate(run(2, work)):
        assert "for 3 ranks, the mesh has 2; make the plan with this mesh" in size
        assert f"rank {1 - rank}'s, this is rank {rank}; use plan.for_rank({rank})" in owner


def calls_with_a_mesh(mesh, schedule, rank=0):
    """Return a call of each public function that takes a mesh, by name: with a plan of the schedule, or if it
    is None, without a plan if possible."""
    x, edges = torch.ones(S // 2, 2, 16), torch.tensor([0, S])
    plan = make_plan(mask(), world_size=2, rank=rank, schedule=schedule or "auto")
    placed = mask() if schedule is None else plan
    attend = tritoncp.ContextParallel()._apply(FlexAttention(), mesh)
    calls = {
        "make_plan": lambda: make_plan(mask(), mesh, schedule=schedule or "auto"),
        "flex_attention": lambda: flex_attention(q(), q(), q(), placed, mesh=mesh),
        "varlen_attention": lambda: tritoncp.varlen_attention(
            x,
            x,
            x,
            edges if schedule is None else placed,
            mesh=mesh,
            causal=True if schedule is None else None,
        ),
        "shard": lambda: tritoncp.shard(q(S), placed, mesh, dim=2),
        "unshard": lambda: tritoncp.unshard(q(), placed, mesh, dim=2),
        "reshard": lambda: tritoncp.reshard(q(), schedule and placed, None, mesh, dim=2),
        "roll": lambda: tritoncp.roll(q(), plan, 1, mesh, dim=2),
        "select_keys": lambda: tritoncp.select_keys(q(), q(), top=2, block_mask=placed, mesh=mesh),
        "ContextParallel": lambda: attend(q(), q(), q(), block_mask=placed),
    }
    if schedule is None:
        calls["dual_chunk_to_contiguous"] = lambda: tritoncp.dual_chunk_to_contiguous(x, edges, mesh)
        calls["contiguous_to_dual_chunk"] = lambda: tritoncp.contiguous_to_dual_chunk(x, edges, mesh)
    return calls


@pytest.mark.long
def test_a_mesh_of_two_dimensions_is_refused_without_a_schedule_that_needs_two():
    """All ranks would share one sequence, and mix the texts of two replicas."""

    def work(group):
        square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        said = {}
        for schedule in (None, "auto", *SCHEDULES):
            of_one, of_two = (
                calls_with_a_mesh(mesh, schedule, group.rank()) for mesh in (square["cp"], square)
            )
            said |= {(schedule, name): (attempt(of_one[name]), attempt(of_two[name])) for name in of_two}
        return said

    for said in run(2, work):
        for (schedule, name), (flat, square) in said.items():
            assert not isinstance(flat, str), (schedule, name, flat)
            if (schedule or "").startswith("ulysses"):
                assert not isinstance(square, str), (schedule, name, square)
            else:
                assert re.match(r"ValueError: mesh has two dimensions, \('dp', 'cp'\)", square), (
                    name,
                    square,
                )
                assert "share one sequence: pass mesh['cp']" in square
    taking = {
        name
        for name in tritoncp.__all__
        if callable(fn := getattr(tritoncp, name)) and "mesh" in inspect.signature(fn).parameters
    }
    assert calls_with_a_mesh(None, None).keys() - {"ContextParallel"} == taking


@pytest.mark.long
def test_the_first_rank_warns_once_of_uneven_natural_order():
    def work(group):
        heard = []
        even = document(ids=IDS), document(ids=other_ids(1)), document(lengths=[8, 24])  # 1.2 times as many
        for mod in (causal(), causal(), *even):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                flex_attention(q(), q(), q(), mod, group)
                flex_attention(q(), q(), q(), mask(mod), group)
            heard.append([str(w.message) for w in caught if "natural order" in str(w.message)])
        return heard

    first, second = run(2, work)
    assert second == [[]] * 5
    (text,), *rest = first
    assert rest == [[]] * 4
    assert "rank 1 of 2 does 1.36 times the mean work" in text
    assert "plan = tritoncp.make_plan(block_mask, mesh)" in text and "tritoncp.shard(x, plan, dim=2)" in text


# -- at every call, where asked for ------------------------------------------------------------------------


def scaled(factor):
    return lambda s, b, h, q, kv: s * factor


def differ(group, name):
    """Agree on plans, and then make different calls."""
    odd = group.rank() == 1
    plan, other = make_plan(mask(), group), make_plan(mask(document(ids=IDS)), group)
    flex_attention(q(), q(), q(), causal(), group)  # a plan both ranks remember
    for factor in (0.5, torch.tensor(0.5)):
        flex_attention(q(), q(), q(), scaled(factor), plan, mesh=group)
    calls = {
        "mask": lambda: flex_attention(q(), q(), q(), other if odd else plan, group),
        "hit and miss": lambda: flex_attention(q(), q(), q(), document(ids=IDS) if odd else causal(), group),
        "failure": lambda: flex_attention(q(), q(), q()[:, :1] if odd else q(), plan, group),
        "tensor": lambda: flex_attention(q(), q(), q(), scaled(torch.tensor(0.5 + odd)), plan, mesh=group),
        "number": lambda: flex_attention(q(), q(), q(), scaled(0.5 + odd), plan, mesh=group),
    }
    return attempt(calls[name])


NAMED = {  # by call: the difference in the errors of ranks 0 and 1
    "mask": ("Disagreement: .*differ in mask",) * 2,
    "hit and miss": ("Disagreement: .*differ in call",) * 2,
    "failure": ("PeerLost: .*call 4 of rank 1 failed: ValueError.*do not fit together", "ValueError"),
    "tensor": ("Disagreement: .*differ in captures",) * 2,
    "number": ("Disagreement: .*differ in captures.*Rank 0 has 0.5. Rank 1 has 1.5",) * 2,
}


@pytest.mark.long
def test_every_call_is_compared_if_requested(monkeypatch):
    """Each in a group of its own."""
    monkeypatch.setattr(consistency, "CHECKED", True)

    def work(group):
        return [differ(torch.distributed.new_group(), name) for name in NAMED]

    for rank, errors in enumerate(run(2, work)):
        for expected, text in zip(NAMED.values(), errors, strict=True):
            assert re.match(expected[rank], text, re.DOTALL), text
