"""Consistency checks between ranks, on real gloo processes: ranks agree about a plan, or every rank raises
the difference."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tests.multiprocess.ranks import attempt, run
from tritoncp import causal, document, flex_attention, make_plan
from tritoncp.distributed import consistency

S = 32
IDS = torch.arange(S) // 5


pytestmark = pytest.mark.usefixtures("cpu_engine")


def mask(mod=None, length=S):
    return tritoncp.create_block_mask(mod or causal(), 1, 1, length, length, BLOCK_SIZE=8)


def q(rows=S // 2, **options):
    return torch.zeros(1, 2, rows, 16, **options)


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
            (what, attempt(partial(call, one, torch.distributed.new_group())))
            for what, one in masks.items()
            for call in calls
        ]

    for rank, outcomes in enumerate(run(2, work)):
        for what, text in outcomes:
            assert text.startswith("Disagreement: the ranks differ in mask: rank 0 against rank 1")
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


@pytest.mark.bar(18)
def test_different_options_calls_shapes_and_versions_are_named(monkeypatch):
    def work(group):
        rank = group.rank()
        outcomes = [
            attempt(lambda: make_plan(mask(), group, balancer=["ptrr", "head_tail"][rank])),
            attempt(
                lambda: flex_attention(*[q(dtype=[torch.float32, torch.float64][rank])] * 3, causal(), group),
            ),
        ]
        versions = consistency.versions
        if rank:
            consistency.versions = lambda: consistency.fact("torch 9")
        outcomes.append(attempt(lambda: make_plan(mask(), group)))
        consistency.versions = versions
        calls = make_plan, lambda mask, group: flex_attention(q(), q(), q(), mask, group)
        outcomes.append(attempt(lambda: calls[rank](mask(), group)))
        closed = attempt(lambda: make_plan(mask(), group))
        assert re.match("GroupClosed: .*the ranks differ in call", closed, re.DOTALL)
        return outcomes

    for rank, outcomes in enumerate(run(2, work)):
        for text, name in zip(outcomes, ("options", "dtype", "versions", "call"), strict=True):
            assert text.startswith(f"Disagreement: the ranks differ in {name}: rank 0 against rank 1")
        assert ["'ptrr'", "'head_tail'"][rank] in outcomes[0]
        assert ["float32", "float64"][rank] in outcomes[1]


def test_a_balancer_of_ones_own_is_known_by_what_it_deals():
    def work(group):
        def mine(blocks):
            return [range(4), range(4, len(blocks.costs))]

        def mixed(blocks):
            return [range(len(blocks.costs)), []][:: 1 - 2 * group.rank()]

        return make_plan(mask(), group, balancer=mine).balancer, attempt(
            lambda: make_plan(mask(), group, balancer=mixed)
        )

    for rank, (name, text) in enumerate(run(2, work)):
        assert name == "mine" and text.startswith("Disagreement")
        assert "differ in placement" in text and f"Rank {rank} has balancer='mixed'" in text


def test_lengths_that_do_not_add_up_are_told_everywhere():
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


def test_a_mesh_is_a_group_and_must_have_one_dimension():
    def work(group):
        flat = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        flex_attention(q(), q(), q(), causal(), flat)
        flex_attention(q(), q(), q(), None, causal(), mesh=flat["cp"])
        square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        flex_attention(q(), q(), q(), causal(), square["cp"])
        wrong = make_plan(mask(), group).for_rank(1 - group.rank())
        return (
            attempt(lambda: flex_attention(q(), q(), q(), causal(), square)),
            attempt(lambda: flex_attention(q(), q(), q(), make_plan(mask(), world_size=3), group)),
            attempt(lambda: flex_attention(q(), q(), q(), wrong, group)),
        )

    for rank, (square, size, owner) in enumerate(run(2, work)):
        assert "mesh has two dimensions, for which a Plan is needed" in square and "mesh['cp']" in square
        assert "for 3 ranks, the mesh has 2; make the plan with this mesh" in size
        assert f"rank {1 - rank}'s, this is rank {rank}; use plan.for_rank({rank})" in owner


def test_uneven_natural_order_is_told_once_by_the_first_rank():
    def work(group):
        heard = []
        even = document(ids=IDS), document(ids=other_ids(1)), document(lengths=[8, 24])  # the last: 1.2 times
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


def differ(group, name):
    """Agree on plans, and then make different calls."""
    odd = group.rank() == 1
    plan, other = make_plan(mask(), group), make_plan(mask(document(ids=IDS)), group)
    flex_attention(q(), q(), q(), causal(), group)  # a plan both ranks remember
    calls = {
        "mask": lambda: flex_attention(q(), q(), q(), other if odd else plan, group),
        "hit and miss": lambda: flex_attention(q(), q(), q(), document(ids=IDS) if odd else causal(), group),
        "failure": lambda: flex_attention(q(), q(), q()[:, :1] if odd else q(), plan, group),
    }
    return attempt(calls[name])


NAMED = {  # by call: the difference in the errors of ranks 0 and 1
    "mask": ("Disagreement: .*differ in mask",) * 2,
    "hit and miss": ("Disagreement: .*differ in call",) * 2,
    "failure": ("PeerLost: .*call 2 of rank 1 failed: ValueError.*do not fit together", "ValueError"),
}


def test_every_call_is_compared_where_asked_for(monkeypatch):
    """Each in a group of its own."""
    monkeypatch.setattr(consistency, "CHECKED", True)

    def work(group):
        return [differ(torch.distributed.new_group(), name) for name in NAMED]

    for rank, errors in enumerate(run(2, work)):
        for expected, text in zip(NAMED.values(), errors, strict=True):
            assert re.match(expected[rank], text, re.DOTALL), text
