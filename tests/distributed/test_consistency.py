"""Consistency checks between ranks, on real gloo processes: ranks agree about a plan, or every rank raises
the difference."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tests.multiprocess.ranks import run
from tritoncp import causal, document, flex_attention, make_plan, shard, unshard
from tritoncp.distributed import consistency
from tritoncp.ops import engine_factory
from tritoncp.reference.dense import dense_attention

S = 32
IDS = torch.arange(S) // 5


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)


def said(group, call):
    """The exception of a call on this rank."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return None


def mask(mod=None, length=S):
    return tritoncp.create_block_mask(mod or causal(), 1, 1, length, length, BLOCK_SIZE=8)


def q(rows=S // 2, **options):
    return torch.zeros(1, 2, rows, 16, **options)


def test_ranks_that_agree_get_their_plans_and_the_right_answer():
    whole = torch.randn(1, 2, S, 16)
    mask_mod = document(ids=IDS)
    expected = dense_attention(whole, whole, whole, mask(mask_mod)).out

    def work(group):
        plan = make_plan(mask(mask_mod), group)
        local_shard = shard(whole, plan, dim=2)
        out = unshard(flex_attention(local_shard, local_shard, local_shard, plan, group), plan, group, dim=2)
        piece = shard(whole, mask_mod, group, dim=2)
        natural = unshard(flex_attention(piece, piece, piece, mask_mod, group), mask(mask_mod), group, dim=2)
        uneven = whole[:, :, : S - 5] if group.rank() == 0 else whole[:, :, S - 5 :]
        part = flex_attention(uneven, uneven, uneven, mask(mask_mod), group)
        return plan.rank, out, natural, part

    ranks = run(2, work)
    assert [rank for rank, *_ in ranks] == [0, 1]
    for _, out, natural, _ in ranks:
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(natural, expected, atol=2e-6, rtol=1e-5)
    parts = torch.cat([part for *_, part in ranks], 2)
    torch.testing.assert_close(parts, expected, atol=2e-6, rtol=1e-5)


def other_ids(rank):
    ids = IDS.clone()
    ids[-1] += rank
    return ids


DIFFERENT = {
    "tensor": lambda rank: document(ids=other_ids(rank)),
    "number": lambda rank: tritoncp.sliding_window(3 + rank),
    "code": lambda rank: (lambda b, h, q, kv: q >= kv) if rank else (lambda b, h, q, kv: q > kv),
    "captured number": lambda rank: lambda b, h, q, kv: q - kv < 4 + rank,
}


VALUES = {  # parts of the message on every rank
    "tensor": ("Rank 0 has", "Rank 1 has"),
    "number": ("sliding_window(3", "sliding_window(4"),
    "code": ("test_consistency.py",),
    "captured number": ("rank = 0", "rank = 1"),
}


def test_different_masks_are_named_on_every_rank():
    """Each in a group of its own, by make_plan and by flex_attention."""

    def work(group):
        calls = make_plan, lambda mask, group: flex_attention(q(), q(), q(), mask, group)
        masks = {what: mask(make(group.rank())) for what, make in DIFFERENT.items()}
        return [
            (what, said(few := torch.distributed.new_group(), lambda c=call, m=one, g=few: c(m, g)))
            for what, one in masks.items()
            for call in calls
        ]

    for rank, outcomes in enumerate(run(2, work)):
        for what, (kind, text, _) in outcomes:
            assert kind == "Disagreement" and "differ in mask: rank 0 against rank 1" in text
            assert f"Rank {rank} has Mask(B=1" in text and "Every rank needs the same global mask" in text
            assert all(value in text for value in VALUES[what])


def test_the_same_mask_made_twice_is_the_same():
    def work(group):
        for name in DIFFERENT:
            make_plan(mask(DIFFERENT[name](0)), group)
        table = torch.arange(S) + 0
        bm = torch_block_mask(lambda b, h, q, kv: kv <= table[q], 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
        return make_plan(bm, group).rank

    assert run(2, work) == [0, 1]


def test_different_options_calls_shapes_and_versions_are_named(monkeypatch):
    def work(group):
        rank = group.rank()
        outcomes = [
            said(group, lambda: make_plan(mask(), group, balancer=["ptrr", "head_tail"][rank])),
            said(
                group,
                lambda: flex_attention(*[q(dtype=[torch.float32, torch.float64][rank])] * 3, causal(), group),
            ),
        ]
        versions = consistency.versions
        if rank:
            consistency.versions = lambda: consistency.fact("torch 9")
        outcomes.append(said(group, lambda: make_plan(mask(), group)))
        consistency.versions = versions
        calls = make_plan, lambda mask, group: flex_attention(q(), q(), q(), mask, group)
        outcomes.append(said(group, lambda: calls[rank](mask(), group)))
        closed = said(group, lambda: make_plan(mask(), group))
        assert closed[0] == "GroupClosed" and "the ranks differ in call" in closed[1]
        return outcomes

    for rank, outcomes in enumerate(run(2, work)):
        for (kind, text, _), name in zip(outcomes, ("options", "dtype", "versions", "call"), strict=True):
            assert kind == "Disagreement" and f"the ranks differ in {name}: rank 0 against rank 1" in text
        assert ["'ptrr'", "'head_tail'"][rank] in outcomes[0][1]
        assert ["float32", "float64"][rank] in outcomes[1][1]


def test_a_balancer_of_ones_own_is_known_by_what_it_deals():
    def work(group):
        def mine(blocks):
            return [range(4), range(4, len(blocks.costs))]

        def mixed(blocks):
            return [range(len(blocks.costs)), []][:: 1 - 2 * group.rank()]

        return make_plan(mask(), group, balancer=mine).balancer, said(
            group, lambda: make_plan(mask(), group, balancer=mixed)
        )

    for rank, (name, (kind, text, _)) in enumerate(run(2, work)):
        assert name == "mine" and kind == "Disagreement"
        assert "differ in placement" in text and f"Rank {rank} has balancer='mixed'" in text


def test_lengths_that_do_not_add_up_are_told_everywhere():
    def work(group):
        local = mask(length=S // 2)
        short = q(12) if group.rank() else q()
        return [
            said(group, lambda: flex_attention(q(), q(), q(), local, group)),
            said(group, lambda: flex_attention(short, short, short, mask(), group)),
        ]

    for first, second in run(2, work):
        assert "[16, 16] rows long, 32 together, the mask is for 16" in first[1]
        assert "[16, 12] rows long, 28 together, the mask is for 32" in second[1]


def test_a_mesh_is_a_group_and_must_have_one_dimension():
    def work(group):
        flat = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        flex_attention(q(), q(), q(), causal(), flat)
        flex_attention(q(), q(), q(), None, causal(), mesh=flat["cp"])
        square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        flex_attention(q(), q(), q(), causal(), square["cp"])
        wrong = make_plan(mask(), group).for_rank(1 - group.rank())
        return (
            said(group, lambda: flex_attention(q(), q(), q(), causal(), square)),
            said(group, lambda: flex_attention(q(), q(), q(), make_plan(mask(), world_size=3), group)),
            said(group, lambda: flex_attention(q(), q(), q(), wrong, group)),
        )

    for rank, (square, size, owner) in enumerate(run(2, work)):
        assert "mesh of two dimensions needs a plan" in square[1] and "mesh['cp']" in square[1]
        assert "for 3 ranks, the mesh has 2; make the plan with this mesh" in size[1]
        assert f"rank {1 - rank}'s, this is rank {rank}; use plan.for_rank({rank})" in owner[1]


def test_uneven_natural_order_is_told_once_by_the_first_rank():
    def work(group):
        heard = []
        for mod in (causal(), causal(), document(ids=IDS), document(ids=other_ids(1))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                flex_attention(q(), q(), q(), mod, group)
                flex_attention(q(), q(), q(), mask(mod), group)
            heard.append([str(w.message) for w in caught if "natural order" in str(w.message)])
        return heard

    first, second = run(2, work)
    assert second == [[]] * 4
    (text,), *rest = first
    assert rest == [[]] * 3
    assert "rank 1 of 2 does 1.36 times the mean work" in text
    assert "plan = tritoncp.make_plan(block_mask, mesh)" in text and "tritoncp.shard(x, plan, dim=2)" in text


# -- at every call, where asked for ------------------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch):
    monkeypatch.setattr(consistency, "CHECKED", True)


def differing(names):
    """Let two ranks agree on a plan, and then make different calls: in a group of its own for each name."""

    def work(group):
        return [differ(torch.distributed.new_group(), name) for name in names]

    return work


def differ(group, name):
    odd = group.rank() == 1
    plan, other = make_plan(mask(), group), make_plan(mask(document(ids=IDS)), group)
    flex_attention(q(), q(), q(), causal(), group)  # a plan both ranks remember
    calls = {
        "mask": lambda: flex_attention(q(), q(), q(), other if odd else plan, group),
        "failure": lambda: flex_attention(q(), q(), q()[:, :1] if odd else q(), plan, group),
        "hit and miss": lambda: flex_attention(q(), q(), q(), document(ids=IDS) if odd else causal(), group),
    }
    return said(group, calls[name])


def twice(score, b, h, q_idx, kv_idx):
    return score * 2


NAMED = {  # by call: the difference in the error of each rank
    "mask": "differ in mask",
    "hit and miss": "differ in call",
}


def test_every_call_is_compared_where_asked_for(checking):
    for outcomes in run(2, differing(NAMED)):
        for named, (kind, text, _) in zip(NAMED.values(), outcomes, strict=True):
            assert kind == "Disagreement"
            assert re.search(named, text), text


def test_a_rank_that_fails_in_a_call_is_named_where_asked_for(checking):
    ((kind, text, _),), ((own, _, _),) = run(2, differing(["failure"]))
    assert (kind, own) == ("PeerLost", "ValueError")
    assert "call 2 of rank 1 failed: ValueError" in text and "do not fit together" in text
