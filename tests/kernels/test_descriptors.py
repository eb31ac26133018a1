"""Tiles by tensor descriptor (TMA): the same bits as by pointer, and pointers wherever they cannot go."""

import pytest
import torch

from tests.device import REPEATS
from tests.kernels.support.harness import MASKS, QKV, check, cotangents, engine_of, qkv, run, same, single
from tritoncp import Mask, causal, create_block_mask
from tritoncp.core.records import replace
from tritoncp.kernels import engine
from tritoncp.kernels.operands import streamed_tensors
from tritoncp.kernels.tiles import copyable, descriptors
from tritoncp.planning.step_tables import BackwardStep, ForwardStep


def copied(x: QKV, mask: Mask) -> dict[str, bool]:
    """Name the passes that copy their tiles by descriptor."""
    engine, tables = engine_of(x, USE_TMA=True), single(mask).tables(x.q.device, *x.q.shape[:2])
    out, lse = torch.empty(*x.q.shape[:3], x.v.shape[3]), torch.empty(x.q.shape[:3])
    backward = BackwardStep(*x, out, lse, lse, tables)
    launches = {
        "forward": engine.forward(ForwardStep(*x, tables, out, lse)),
        "dq": engine.dq(backward, torch.empty_like(x.q)),
        "dkdv": engine.dkdv(backward, torch.empty_like(x.k), torch.empty_like(x.v)),
    }
    return {
        kind: launch.args["q_desc0" if kind == "dkdv" else "k_desc0"] is not None
        for kind, launch in launches.items()
    }


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize(("name", "n"), [*((name, 50) for name in MASKS), ("full", 64), ("mask_mod", 64)])
def test_same_bits_as_by_pointer(name: str, n: int) -> None:
    """Cases have two pieces of channels, padded channels, grouped heads, and a sequence that ends inside a
    tile or with a tile."""
    x = qkv(n, batch=2, heads=2, kv_heads=1, dim=40, v_dim=16)
    mask, start = MASKS[name](n), cotangents(x)
    assert all(copied(x, mask).values())
    got = check(x, mask, start=start, USE_TMA=True)
    for _ in range(REPEATS):
        same(got, run(x, mask, start=start, USE_TMA=False))
        same(got, run(x, mask, start=start, USE_TMA=True))


@pytest.mark.bar(6)
def test_rows_behind_the_tokens_are_never_read() -> None:
    """The buffer is longer than its slots, with NaN after them: a descriptor would copy NaN into the
    products."""
    x, mask = qkv(50), MASKS["causal"](50)
    long = QKV(*(torch.cat([t, torch.full_like(t[:, :, :14], torch.nan)], 2) for t in x))
    plan = single(mask)
    start = torch.empty(1, 1, 64, 16), torch.empty(1, 1, 64)
    engine = engine_of(x, USE_TMA=True)
    engine.forward(ForwardStep(*long, plan.tables(x.q.device, 1, 1), *start))()
    assert torch.equal(start[0][:, :, :50].isnan(), torch.zeros(1, 1, 50, 16, dtype=torch.bool))
    assert not any(copied(long, mask).values()) and all(copied(x, mask).values())


def odd_heads(x: torch.Tensor) -> torch.Tensor:
    """The same values, three elements between the heads."""
    strides = 2 * x[0, 0].numel() + 6, x[0, 0].numel() + 3, x.shape[3], 1
    return torch.zeros(strides[0]).as_strided_scatter(x, x.shape, strides).as_strided(x.shape, strides)


UNFIT = {
    "channels apart": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "odd rows": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "odd address": lambda x: torch.cat([x, x[..., :4]], -1)[..., 1:-3],
    "shared heads": lambda x: x[:, :1].expand_as(x),
    "one channel for all": lambda x: x[..., :1].expand_as(x),
    "odd heads": odd_heads,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_descriptors_cannot_copy_are_read_by_pointer(name: str) -> None:
    x = qkv(64, heads=2)
    x = x._replace(k=UNFIT[name](x.k))
    assert not copyable(x.k) and copyable(x.v)
    uses_tma = copied(x, MASKS["causal"](64))
    assert uses_tma == {"forward": False, "dq": False, "dkdv": True}
    check(x, MASKS["causal"](64), USE_TMA=True)


def test_a_dimension_of_one_may_have_any_stride() -> None:
    x = torch.randn(1, 1, 8, 16).as_strided((1, 1, 8, 16), (3, 5, 16, 1))
    assert copyable(x)
    assert not copyable(x[:, :, :0]) and not copyable(x[:0])
    (first, second) = descriptors(x, 8, (16, 0))
    assert first is not None and second is None
    assert all(stride % 4 == 0 for stride in first.strides[:3])


def test_blocks_that_no_tile_divides_are_read_by_pointer() -> None:
    for block in (16, 24, 32, 40):
        mask = create_block_mask(causal(), None, None, 60, 60, BLOCK_SIZE=block)
        for one in (mask, replace(mask, window=None)):
            assert set(copied(qkv(60), one).values()) == {block % 16 == 0}


@pytest.mark.parametrize(("n", "ends"), [(64, "block"), (50, "buffer")])
def test_streams_know_their_bytes_and_ends(n: int, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section has as many heads as fit the cache, by the bytes of one head's keys and values."""
    x = qkv(n, batch=3, heads=4, kv_heads=2, dim=40, v_dim=16)
    tables, sections = single(MASKS["window"](n)).tables("cpu", 2, 4), []
    streamed = streamed_tensors(tables, {"k": x.k, "v": x.v}, by_keys=False)
    bytes_of_head = n * (40 + 16) * x.k.element_size()
    assert (streamed.ends, streamed.count_bytes()) == (ends, 2 * bytes_of_head)
    monkeypatch.setattr(engine, "section_heads", lambda *facts: sections.append(facts) or 1)
    copied(x, MASKS["window"](n))
    assert sections[0][:2] == (2, bytes_of_head)
