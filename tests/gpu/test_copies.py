"""Copies from the GPU to the host: one to make a plan, none in later calls."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from tests.device import DEVICE
from tritoncp import (
    and_masks,
    causal,
    create_block_mask,
    document,
    flex_attention,
    make_plan,
    varlen_attention,
)
from tritoncp.kernels.routes import route_check
from tritoncp.kernels.tile_rules import architecture, widest_route

S = 512


def copies_back(work):
    """Count the copies from the device to the host while work() runs."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sum("DtoH" in event.name or "DeviceToHost" in event.name for event in on_device)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def masks():
    ids = torch.arange(S, device=DEVICE) // 100
    odd = torch.arange(S, device=DEVICE) % 3 == 0

    def dilated(b, h, q, kv):
        return (q >= kv) & (odd[q] | odd[kv]) & (ids[q] == ids[kv])

    def untranslatable(b, h, q, kv):
        return torch.cumsum(ids, 0).msort()[q] % 3 != kv % 3

    return {
        "intervals": torch_block_mask(
            lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), 1, 1, S, S, DEVICE
        ),
        "mask_mod": torch_block_mask(dilated, 1, 1, S, S, DEVICE),
        "bits": torch_block_mask(untranslatable, 1, 1, S, S, DEVICE),
        "closed": and_masks(causal(), document(ids=ids)),
    }


def tensors():
    return [torch.randn(1, 2, S, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("kind", ["intervals", "mask_mod", "bits", "closed"])
def test_a_plan_takes_one_copy_and_its_use_none(kind):
    mask, (q, k, v) = masks()[kind], tensors()
    assert copies_back(lambda: flex_attention(q, k, v, mask)) <= 1  # the plan is made here
    flex_attention(q, k, v, mask).sum().backward()  # kernels are compiled here
    torch.cuda.synchronize()
    with no_waiting():
        out = flex_attention(q, k, v, mask)
        out.backward(torch.ones_like(out))
    assert copies_back(lambda: flex_attention(q, k, v, mask).sum().backward()) == 0


def test_packed_lengths_take_one_copy_and_their_use_none():
    q = torch.randn(S, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    edges, padded = (torch.tensor(x, device=DEVICE) for x in ([0, 100, 400], [0, 128, S]))

    def call():
        return varlen_attention(q, q, q, edges, causal=True, cu_seqlens_q_padded=padded)

    assert copies_back(call) == 1
    assert copies_back(call) == 0


def test_a_closed_form_of_cpu_tensors_takes_none():
    q, k, v = tensors()
    mask = and_masks(causal(), document(lengths=[200, 312]))
    assert copies_back(lambda: flex_attention(q, k, v, mask)) == 0


def test_a_plan_made_by_hand_takes_one():
    plans = []
    mask = masks()["mask_mod"]
    assert copies_back(lambda: plans.append(make_plan(mask, world_size=4))) == 1
    assert plans[0].world_size == 4


def test_a_mask_of_gpu_tensors_is_the_one_of_their_copies():
    ids, noise = torch.randint(0, 9, (2, 4096)).sort(1).values, torch.randint(0, 3, (4096,))

    def mask_of(ids, noise):
        def mod(b, h, q, kv):
            return (ids[b, q] == ids[b, kv]) & (noise[q] <= noise[kv] + h)

        return create_block_mask(mod, 2, 2, 4096, 4096)

    assert mask_of(ids, noise).runs == mask_of(ids.cpu(), noise.cpu()).runs


def test_score_mods_must_bring_their_tensors():
    table, (q, k, v) = torch.zeros(S, device="cpu"), tensors()
    with pytest.raises(ValueError, match=r"on cpu, the query is on cuda:0; move it there once"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j], causal())


def test_a_route_is_compared_once_and_not_in_a_graph(monkeypatch):
    """The comparison copies its result to the host."""
    monkeypatch.setattr(route_check, "_VERDICTS", {})
    q, k, v = (x.detach() for x in tensors())
    options = {"ROUTE": "gluon"}
    want = flex_attention(q, k, v)
    has_route = widest_route(architecture(q.device), "gluon")
    words = "which a graph cannot capture" if has_route else "ROUTE='gluon' is requested"
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match=words), torch.cuda.graph(graph):
        out = flex_attention(q, k, v, kernel_options=options)
    graph.replay()
    assert torch.equal(out, want)
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if has_route else "ignore", message="ROUTE=")
        assert (copies_back(lambda: flex_attention(q, k, v, kernel_options=options)) > 0) == (has_route > 0)
        assert copies_back(lambda: flex_attention(q, k, v, kernel_options=options)) == 0


def test_a_graph_uses_the_copies_of_an_earlier_call():
    """A captured call reads the tables and the CPU tensors of a mask_mod that the call before it copied."""
    odd, (q, k, v) = torch.arange(S, device="cpu") % 3 == 0, (x.detach() for x in tensors())
    plan = make_plan(create_block_mask(lambda b, h, q, kv: (q >= kv) & (odd[q] | odd[kv]), 1, 1, S, S))
    first = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="once before the capture"), torch.cuda.graph(first):
        flex_attention(q, k, v, plan)
    flex_attention(q, k, v, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, plan)
    q.normal_()
    graph.replay()
    assert torch.equal(out, flex_attention(q, k, v, plan))
