"""Any head dim, length, block, stride and head count: forward and backward against the oracle."""

from collections.abc import Callable
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
import torch
from torch import Tensor

import tritoncp
from tests.device import ON_GPU
from tests.kernels.support.harness import F32, F64, QKV, Results, agree, check, cotangents, qkv, run, same
from tritoncp import Mask, and_masks, causal, create_block_mask, document, full_mask, sliding_window

DIMS = [16, 24, 40, 64, 80, 96, 128, 192, 256]
SIZES = [  # (head dim of q, head dim of v)
    *zip(DIMS, DIMS[4:] + DIMS[:4], cycle([F32])),
    *zip(DIMS, DIMS, cycle([F64])),
    *((dim, 257 - dim, F32) for dim in (1, 3, 8, 17, 65, 130, 200, 255)),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("dim", "v_dim", "dtype"), SIZES)
@pytest.mark.bar(1)
def test_every_head_dim_and_dq_other_than_dv(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    """Odd head dims are padded."""
    x = qkv(21, dim=dim, v_dim=v_dim, dtype=dtype)
    check(x, create_block_mask(causal(), None, None, 21, 21, BLOCK_SIZE=16))


BLOCKS = [16, 64, 100, 8, (64, 128), (128, 32), (16, 100), (48, 24)]
SHORT = [(block, lengths) for block in (16, (128, 32)) for lengths in ((1, 70), (70, 1), (1, 1))]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("block", "lengths"), [*product(BLOCKS, [(67, 110), (110, 67)]), *SHORT], ids=str)
@pytest.mark.bar(10)
def test_any_block_and_lengths_that_do_not_divide(block: int | tuple, lengths: tuple[int, int]) -> None:
    mod = and_masks(sliding_window(40, 20), document(lengths=[30, 1, 33, 70]))
    x = qkv(*lengths)
    check(x, create_block_mask(mod, None, None, *lengths, BLOCK_SIZE=block), fwd_BLOCK_M=32, bwd_BLOCK_N1=32)


def channels_apart(x: Tensor) -> Tensor:
    """The same values, neighbours in the last dimension three elements apart."""
    wide = torch.full((*x.shape, 3), torch.nan, dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, S, H, D] transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "[S, B, H, D] permuted": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "channels before rows": lambda x: x.mT.contiguous().mT,
    "channels apart": channels_apart,
    "a slice of a larger buffer": lambda x: torch.nn.functional.pad(x, (3, 5, 7, 2), value=torch.nan)[
        ..., 7:-2, 3:-5
    ],
    "off by one element": lambda x: torch.cat([torch.full((1,), torch.nan), x.reshape(-1)])[1:].view(x.shape),
}


@cache
def results_of_contiguous_tensors(engine: str) -> tuple[QKV, Mask, tuple[Tensor, Tensor], Results]:
    """Draw tensors and gradients, and compute the results once for all layouts."""
    x = qkv(20, 30, batch=2, heads=2, kv_heads=1, dim=24, v_dim=40)
    mask = create_block_mask(causal(), None, None, 20, 30, BLOCK_SIZE=16)
    start = cotangents(x)
    return x, mask, start, run(x, mask, start=start)


@pytest.mark.sample(3)
@pytest.mark.bits
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.bar(8)
def test_strides_do_not_matter(layout: str, engine: str) -> None:
    """q, k, v and the gradient of out have any layout; the answers equal those of contiguous tensors, in
    kernels bit for bit. If channels are not adjacent, compiled threads sum out * dout in another order."""
    x, mask, (dout, dlse), want = results_of_contiguous_tensors(engine)
    move = LAYOUTS[layout]
    moved = QKV(*(move(t) for t in x))
    assert not moved.q.is_contiguous() or layout == "off by one element"
    got = run(moved, mask, start=(move(dout), dlse))
    (agree if layout == "channels before rows" or engine == "cpu" else same)(got, want)


TILES_OF_32 = {f"BLOCK_{side}{kernel}": 32 for side in "MN" for kernel in ("", "1", "2")}


@pytest.mark.bar(9)
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("far", ["heads", "rows"])
def test_offsets_beyond_two_to_the_31(far: str, part: str) -> None:
    """The second head, or the last row of a tile, lies that far from the first one, in memory of which the
    CPU provides only the pages in use."""
    x, row = qkv(36, heads=2, dtype=torch.float16), 2**26 + 2**22
    strides = {"heads": (0, 2**31 + 64, 64, 1), "rows": (0, 64, row, 1)}[far]
    n = 36 * row
    memory = torch.zeros(n, dtype=x.q.dtype) if ON_GPU else torch.from_numpy(np.zeros(n, np.float16))
    placed = memory.as_strided(x.q.shape, strides)
    placed.copy_(getattr(x, part))
    mask = create_block_mask(causal(), None, None, 36, 36, BLOCK_SIZE=32)
    check(x._replace(**{part: placed}), mask, **TILES_OF_32)


@pytest.mark.bar(8)
def test_expanded_tensors_are_read_in_place() -> None:
    """Batch rows share k, heads share v, both share q; the gradient of out is one expanded number."""
    x = qkv(40, batch=2, heads=3)
    shared = QKV(
        x.q[:1, :1].expand(2, 3, -1, -1), x.k[:1].expand(2, -1, -1, -1), x.v[:, :1].expand(-1, 3, -1, -1)
    )
    dlse = torch.randn(1, 3, 1).expand(2, 3, 40)
    start = torch.tensor(0.7).expand(2, 3, 40, 16), dlse
    check(shared, create_block_mask(causal(), None, None, 40, 40, BLOCK_SIZE=32), start=start)


@pytest.mark.bar(3)
def test_no_queries_or_no_keys() -> None:
    q, k, v = qkv(0, 20)
    assert tritoncp.flex_attention(q, k, v, full_mask(0, 20)).shape == (1, 1, 0, 16)
    q, k, v = (t.requires_grad_() for t in qkv(20, 0))
    out, lse = tritoncp.flex_attention(q, k, v, full_mask(20, 0), return_lse=True)
    assert bool((out == 0).all() and (lse == -torch.inf).all())
    out.sum().backward()
    assert bool((q.grad == 0).all()) and k.grad.shape == (1, 1, 0, 16)
