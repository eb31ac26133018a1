"""Mistakes: each message names the argument and the remedy, also after a correct call."""

from __future__ import annotations

import builtins
import functools
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tests.call.test_expand import expand_latent, inputs
from tests.masks.packed_documents import cumulative
from tests.planning.test_placement import random_mask
from tritoncp import causal, flex_attention, full_mask, make_plan
from tritoncp.call import check_shards
from tritoncp.call.mask_source import Sources
from tritoncp.call.plan_cache import plan_in_order
from tritoncp.call.read import ShardSizes
from tritoncp.distributed import groups
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.masks.expressions import count, lengths, mask_of
from tritoncp.mods import Untranslatable
from tritoncp.planning.build import build

TABLE = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text())
S = 32


def x(*shape, **options):
    return torch.zeros(shape or (1, 2, S, 16), **options)


def elsewhere():
    """Make a tensor on a device without kernels; it has no values."""
    with FakeTensorMode():
        return torch.empty(1, 2, S, 16, device="mps")


def whole(mod=None, batch=1, heads=1, length=S):
    return tritoncp.create_block_mask(
        causal() if mod is None else mod, batch, heads, length, length, BLOCK_SIZE=16
    )


def call(q=None, k=None, v=None, *rest, **options):
    q = x() if q is None else q
    k = q if k is None else k
    return flex_attention(q, k, k if v is None else v, *rest, **options)


def plan(world_size=2, rank=0, **options):
    return make_plan(whole(**options), world_size=world_size, rank=rank)


def learned_mask():
    weight = torch.zeros(S, requires_grad=True)
    return torch_block_mask(lambda b, h, q, kv: weight[q] >= weight[kv].detach(), 1, 1, S, S, device="cpu")


def lower():
    return torch_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)


def sliced():
    return lower()[:, :, 0]


def shards(mask, q):
    return tritoncp.simulate(2).flex_attention([q] * 2, [q] * 2, [q] * 2, block_mask=mask)


def in_order(mask, lengths, kv_lengths):
    return plan_in_order(Sources.of(mask), ShardSizes.of(x(), x()), lengths, kv_lengths)


def engine(options):
    return TritonEngine(Mods(), 1.0, options)


NAMES = {  # modules for the calls in the table, besides tritoncp
    "tritoncp": tritoncp, "torch": torch, "AuxRequest": AuxRequest, "S": S, "check_shards": check_shards,
    "sizes": ShardSizes.of, "groups": groups, "plan_in_order": in_order, "full_mask": full_mask,
    "mask_of": mask_of, "build": build, "random_mask": random_mask, "cumulative": cumulative, "x": x,
    "inputs": inputs, "expand_latent": expand_latent, "elsewhere": elsewhere, "whole": whole, "call": call,
    "plan": plan, "learned_mask": learned_mask, "lower": lower, "sliced": sliced, "shards": shards,
    "engine": engine, "count": count, "lengths": lengths,
}  # fmt: skip


@functools.cache
def scope_of(area):
    """Return the names of an area's calls."""
    scope = {name: getattr(tritoncp, name) for name in tritoncp.__all__} | NAMES
    exec(TABLE[area].get("setup", ""), scope)
    return scope


@pytest.mark.parametrize(
    ("area", "row"),
    [pytest.param(area, row, id=f"{area}: {row[0][:60]}") for area in TABLE for row in TABLE[area]["rows"]],
)
def test_a_mistake_raises_an_error_with_a_remedy(area, row):
    expression, kind, *patterns = row
    with pytest.raises(getattr(builtins, kind, Untranslatable)) as caught:
        eval(expression, scope_of(area))
    text = " ".join(str(caught.value).split())
    assert all(re.search(pattern, text) for pattern in patterns), text


AFTER_A_GOOD_CALL = {
    "heads that share keys": {"k": x(1, 1, S, 16), "v": x(1, 1, S, 16)},
    "another dtype": {"k": x(dtype=torch.float64)},
    "another length": {"q": x(1, 2, S // 2, 16)},
    "another batch": {"k": x(3, 2, S, 16), "v": x(3, 2, S, 16)},
    "values of other heads": {"v": x(1, 1, S, 16)},
    "an empty head": {"q": x(1, 2, S, 0)},
    "one dimension fewer": {"q": x(2, S, 16)},
    "no tensor": {"k": [1.0]},
    "logits for other heads": {"sinks": x(3)},
    "logits that are no tensor": {"sinks": [0.0, 0.0]},
    "both ways to lse": {"return_lse": True, "return_aux": AuxRequest(lse=True)},
    "aux as a flag": {"return_aux": True},
    "another layout": {"q": x().to_sparse()},
    "a subclass": {"q": torch.nn.Parameter(x(1, 2, S, 264))},
}


@pytest.mark.sample(13)
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", AFTER_A_GOOD_CALL)
def test_a_valid_call_does_not_admit_an_invalid_one(name, planned):
    """Checks are skipped only for calls equal to one that passed; other calls raise the same errors as
    before."""
    mask, wrong = whole(), dict(AFTER_A_GOOD_CALL[name])
    arguments = [wrong.pop(which, x()) for which in "qkv"]
    with pytest.raises((TypeError, ValueError)) as first:
        flex_attention(*arguments, make_plan(mask) if planned else mask, **wrong)
    mask = make_plan(mask) if planned else mask
    for _ in range(2):
        flex_attention(x(), x(), x(), mask)
        flex_attention(x(), x(1, 1, S, 16), x(1, 1, S, 16), mask, enable_gqa=True, sinks=x(2))
        flex_attention(x(), x(), x(), mask, return_aux=AuxRequest(lse=True))
        with pytest.raises(type(first.value), match=re.escape(str(first.value))):
            flex_attention(*arguments, mask, **wrong)


@pytest.mark.usefixtures("cpu_engine")
def test_valid_calls_pass():
    """The valid counterpart of each mistake is accepted."""
    q, k = torch.randn(2, 4, S, 16), torch.randn(1, 2, S, 16)
    out = flex_attention(q, k, k, whole(), enable_gqa=True)  # keys of one batch row serve both batch rows
    both = k.expand(2, -1, -1, -1)
    assert torch.equal(out, flex_attention(q, both, both, whole(), enable_gqa=True))
    assert torch.equal(out, flex_attention(q, both, both, None, whole(), enable_gqa=True))
    assert torch.equal(out, flex_attention(q, both, both, causal(), enable_gqa=True))
    heads_as_rows = torch.randn(1, S, S, 16)
    assert flex_attention(heads_as_rows, heads_as_rows, heads_as_rows, whole()).shape == heads_as_rows.shape
    same = flex_attention(q, both, both, whole(), enable_gqa=True, positions=torch.arange(S))
    assert torch.equal(out, same)
    score = flex_attention(q, both, both, lambda s, b, h, q, kv, scale=1: s * scale, whole(), enable_gqa=True)
    torch.testing.assert_close(out, score)


def test_the_warning_about_order_shows_the_line_of_the_call():
    world, mask = tritoncp.simulate(2), tritoncp.create_block_mask(causal(), 1, 1, 512, 512)
    x = [torch.ones(1, 1, 256, 16)] * 2
    with pytest.warns(UserWarning, match="places blocks in ptrr order") as record:
        world.flex_attention(x, x, x, world.make_plan(mask))
    (warning,) = [warning for warning in record if "places blocks" in str(warning.message)]
    assert warning.filename == __file__
