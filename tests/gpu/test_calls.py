"""Calls outside of the grammar of test_cases.py: large scores, offsets and NaN; few rows; equal bits and
streams; torch.compile, masks of GPU tensors, and a process group of one rank."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.gpu.support import (
    BF16,
    BLOCK,
    DEVICE,
    FP32,
    MASKS,
    ON_GPU,
    N,
    block_mask,
    check,
    qkv,
    relative,
    run,
    same,
    start_of,
)
from tritoncp import causal, full_mask, sliding_window
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.masks import create_block_mask
from tritoncp.planning.step_tables import ForwardStep

KEYS = 8 * N if ON_GPU else N
ROWS = 16 if ON_GPU else 5
LONG = 4096 if ON_GPU else 192
REPEATS = 25 if ON_GPU else 2


@pytest.fixture(autouse=True)
def by_the_rule(monkeypatch):
    """Ignore measured tiles, since bits are compared with engines without measured tiles."""
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")


@pytest.mark.parametrize(("size", "dtype"), [(1e8, BF16), (1e9, FP32)])
def test_gradients_of_large_scores_are_finite(size, dtype):
    x = qkv(dim=24, dtype=FP32)  # a scale that is no power of two
    q, k, v = ((t * s).to(dtype).requires_grad_() for t, s in zip(x, (size**0.5, size**0.5, 1)))
    out = tritoncp.flex_attention(q, k, v, block_mask(causal()), enable_gqa=True)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(t.isfinite().all()) for t in (out, *grads))


@pytest.mark.bar(9)
def test_offsets_beyond_two_to_the_31():
    stride = 2**31 + 64 if ON_GPU else 2**14 + 64
    memory = torch.zeros(stride + N * 64, dtype=BF16, device=DEVICE)
    x = qkv(heads=2, kv_heads=2)
    far = memory.as_strided((1, 2, N, 64), (2 * stride, stride, 64, 1))
    for part in range(3):
        with torch.no_grad():
            far.copy_(x[part])
        moved = x._replace(**{"qkv"[part]: far})
        check(x, MASKS["causal"](), got=run(moved, MASKS["causal"]()))


@pytest.mark.parametrize("mod", [None, tritoncp.softcap(2)], ids=["none", "softcap"])
def test_a_nan_is_in_every_answer_that_saw_it(mod):
    """On a GPU, unlike the CPU, a maximum drops NaN."""
    x, key = qkv(heads=4, kv_heads=2), N // 2
    with torch.no_grad():
        x.q[0, 0, 5] = torch.nan
        x.k[0, 1, key] = torch.nan
    leaves = [t.detach().requires_grad_() for t in x]
    out, aux = tritoncp.flex_attention(
        *leaves, mod, block_mask(causal()), enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    for answer in (out[..., 0], aux.lse, aux.max_scores):
        want = torch.zeros_like(answer, dtype=torch.bool)
        want[0, 0, 5] = want[0, 2:, key:] = True
        assert torch.equal(answer.isnan(), want)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert bool(dq[0, 0, 5].isnan().all() and dq[0, 2:, key:].isnan().all())
    assert bool(dk[0, 0, :6].isnan().all() and dv[0, 0, :6].isnan().all())


@pytest.mark.parametrize(
    ("split", "pack", "tma"), [(1, True, True), (2, False, True), (7, True, False), (64, True, True)]
)
def test_options_change_speed_only(split, pack, tma):
    x = qkv(n=ROWS, kv=KEYS, heads=4, kv_heads=1, dim=128)
    mask = create_block_mask(sliding_window(-1, KEYS - ROWS), 1, 1, ROWS, KEYS, DEVICE, BLOCK)
    options = {"SPLIT_KV": split, "PACK_GQA": pack, "USE_TMA": tma}
    first = check(x, mask, passes=1, **options)
    for _ in range(50 if ON_GPU else 1):
        same(run(x, mask, passes=1, **options), first)


def test_the_rule_packs_and_splits():
    """On a device with many multiprocessors one row of four heads is one tile, and many programs share it."""
    x = qkv(n=1, kv=KEYS, heads=4, kv_heads=1, dim=128)
    tables = tritoncp.make_plan(full_mask(1, KEYS, block=BLOCK)).tables(DEVICE, 1, 4)
    out, lse = torch.empty_like(x.q), torch.empty(1, 4, 1, device=DEVICE)
    launch = TritonEngine(Mods(), 128**-0.5).forward(ForwardStep(*x, tables, out, lse))
    args = launch.parts[0].args
    assert (args["PACK"], (args["splits"] or 1) > 1) == ((4, True) if ON_GPU else (1, False))
    launch()
    assert bool(out.isfinite().all() and (lse > -torch.inf).all())


@pytest.mark.bar(11)
def test_many_runs_give_the_same_bits():
    mask = create_block_mask(causal(), 1, 1, LONG, LONG, BLOCK_SIZE=BLOCK)
    x = qkv(n=LONG, heads=8, kv_heads=2, dim=128)
    first = run(x, mask)
    for _ in range(REPEATS):
        same(run(x, mask), first)


def test_gradients_of_captured_tensors_do_not_depend_on_the_run():
    """Gradients of captures agree up to rounding: atomics add them in any order."""
    captured = [torch.randn(8, 33, device=DEVICE)]
    x, mask = qkv(heads=8, kv_heads=2), MASKS["causal"]()
    first = check(x, mask, relative, captured)
    for _ in range(3):
        second = run(x, mask, relative, captured)
        same(second, first)
        torch.testing.assert_close(second.grads[3], first.grads[3], rtol=1e-4, atol=1e-3)


def test_another_stream_waits_for_its_inputs():
    x, mask = qkv(), MASKS["causal"]()
    first = run(x, mask)
    if not ON_GPU:
        return same(run(x, mask), first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x._replace(q=x.q * 1.0)
        second = run(late, mask)
    torch.cuda.current_stream().wait_stream(stream)
    return same(second, first)


def test_torch_compile_takes_the_call_whole():
    x, plan = qkv(), tritoncp.make_plan(MASKS["causal"]())
    q, k, v = (t.requires_grad_() for t in x)
    table = torch.tensor([0.01, 0.02], device=DEVICE)

    def score(s, b, h, i, j):
        return s + table[h] * (i - j)

    def layer(q, k, v):
        out = tritoncp.flex_attention(q * 2, k, v, score, plan, enable_gqa=True)
        return out.sin()

    expected, (dout, _) = layer(q, k, v), start_of(x)
    grads = torch.autograd.grad(expected, (q, k, v), dout)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    got = compiled(q, k, v)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), dout), grads):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_mask_of_gpu_tensors_is_the_one_of_their_copies():
    ids = torch.randint(0, 9, (2, 4096)).sort(1).values
    noise = torch.randint(0, 3, (4096,))

    def mod_on(device):
        device_ids, dots = ids.to(device), noise.to(device)
        return lambda b, h, q, kv: (device_ids[b, q] == device_ids[b, kv]) & (dots[q] <= dots[kv] + h)

    gpu_mask = tritoncp.create_block_mask(mod_on(DEVICE), 2, 2, 4096, 4096)
    cpu_mask = tritoncp.create_block_mask(mod_on("cpu"), 2, 2, 4096, 4096)
    assert gpu_mask.runs == cpu_mask.runs


@contextlib.contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else None
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=device
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_process_group_of_one_is_one_device():
    whole = MASKS["causal"]()
    x = qkv()
    alone = run(x, whole)
    with group_of_one() as group:
        same(run(x, whole, mesh=group), alone)
        plan = tritoncp.make_plan(whole, group)
        same(run(x, plan, mesh=group), alone)
        q = tritoncp.shard(x.q, plan, dim=2)
        assert torch.equal(tritoncp.unshard(q, plan, group, dim=2), x.q) and q.shape[2] == N
