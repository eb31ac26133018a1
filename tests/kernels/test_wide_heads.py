"""Head dims above 256: more than two pieces of channels, dV and dK in separate launches, and sums whose
channels several launches share."""

import math

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.cases import Case
from tests.cases import check as check_case
from tests.device import generator
from tests.draws import by_turns
from tests.kernels.support.harness import (
    F32,
    F64,
    MASKS,
    Results,
    agree,
    check,
    cotangents,
    engine_of,
    oracle,
    over_ranks,
    qkv,
    run,
    same,
    single,
)
from tests.kernels.support.harness import backward as backward_step
from tritoncp.kernels import engine as engine_module
from tritoncp.kernels.tile_rules import MAX_HEAD_DIM, MAX_V_HEAD_DIM
from tritoncp.reference.dense import dense_attention

DIMS = [(320, 320), (384, 384), (448, 448), (512, 512), (576, 512), (264, 328), (64, 512), (576, 16)]
SCHEDULES = ["allgather", "fetch", "ring", "ulysses", "ulysses+ring"]


def use_parts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Split each sum of more than 256 channels over ``parts`` launches."""
    monkeypatch.setattr(engine_module, "sum_parts", lambda arch, dim: parts if dim > 256 else 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_wide_heads_equal_dense_attention(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    x = qkv(21, heads=2, kv_heads=1, dim=dim, v_dim=v_dim, dtype=dtype)
    check(x, MASKS["intervals"](21, 16))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MASKS)
def test_wide_heads_with_each_kind_of_mask(name: str, engine: str) -> None:
    check(qkv(40, heads=2, kv_heads=1, dim=328, v_dim=264, dtype=F64), MASKS[name](40))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "engine"),
    by_turns(SCHEDULES, ["cpu"]) + by_turns(SCHEDULES, ["kernels"], rare={*SCHEDULES} - {"ring"}),
    indirect=["engine"],
)
def test_wide_heads_on_four_ranks(schedule: str, engine: str) -> None:
    """A ring starts its steps from states; sinks are applied at the end."""
    check_case(
        Case(("causal", 0), schedule=schedule, world=4, balancer="ptrr", group=2, length=40, kv_length=40,
             dims=(320, 264), block=8, sinks=schedule == "ring")
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wide_heads_of_16_bits(dtype: torch.dtype, engine: str) -> None:
    check_case(Case(("window", 9), dims=(576, 512), dtype=dtype, length=33, kv_length=33, heads=1, group=2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.long), 16])
def test_keys_selected_for_wide_heads(block_size: int, engine: str) -> None:
    """18 heads share their keys, in two tiles of 9."""
    length, heads, g = 20, 18, generator(1)
    shapes = (1, heads, length, 576), (1, 1, length, 576), (1, 1, length, 512)
    leaves = [torch.randn(shape, generator=g, dtype=F32).requires_grad_() for shape in shapes]
    blocks = -(-length // block_size)
    chosen = tritoncp.Selection(
        torch.randint(-1, blocks, (1, 1, length, 2), generator=g).int(), block_size=block_size
    )
    mask = MASKS["causal"](length, 16)
    got = tritoncp.flex_attention(*leaves, mask, enable_gqa=True, selected=chosen)
    visible = mask.to_dense(1, 1) & chosen.to_dense(length, length)
    want = dense_attention(*[x.double() for x in leaves], visible).out
    dout = torch.randn(got.shape, generator=g)
    grads = zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout.double()))
    for x, exact in [(got, want), *grads]:
        torch.testing.assert_close(x.double(), exact.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("options", [{}, {"SPLIT_KV": 2, "PACK_GQA": True}], ids=str)
def test_launches_that_share_channels_have_the_results_of_one_launch(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores do not depend on the part, and each channel has the same sum."""
    x, mask = qkv(20, heads=2, kv_heads=1, dim=320, v_dim=272), MASKS["intervals"](20, 16)
    start = cotangents(x)
    one = run(x, mask, start=start, **options)
    use_parts(monkeypatch, 2)
    same(run(x, mask, start=start, **options), one)


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize("schedule", ["ring", "ulysses+ring"])
def test_launches_that_share_channels_start_from_one_state(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts of a step read the maximum and sum before it: the last one stores the new ones."""
    x, mask = qkv(32, heads=2, dim=272, v_dim=272, dtype=F64), MASKS["causal"](32, 16)
    plan = tritoncp.make_plan(mask, world_size=2 if schedule == "ring" else 4, schedule=schedule)
    use_parts(monkeypatch, 2)
    start = cotangents(x)
    agree(over_ranks(x, plan, start=start), oracle(x, mask, start=start))


def learned_score(captured: Tensor):
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + captured[(q - kv) % 5]

    return score


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_of_captures_are_added_once(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_parts(monkeypatch, parts)
    x, captured = qkv(16, dim=272, v_dim=272, dtype=F64), [torch.randn(5, dtype=F64)]
    check(x, MASKS["causal"](16, 16), learned_score, captured)


@pytest.mark.bits
@pytest.mark.parametrize("parts", [1, 2])
def test_steps_add_to_earlier_gradients(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_parts(monkeypatch, parts)
    x, mask = qkv(16, dim=272, v_dim=264), MASKS["causal"](16, 16)
    out, lse, *_ = oracle(x, mask, start=None)
    out, dout = out.to(F32), cotangents(x)[0]
    engine, plan = engine_of(x), single(mask)
    once = backward_step(engine, x, plan, out, lse.to(F32), dout)
    twice = backward_step(
        engine, x, plan, out, lse.to(F32), dout, into=type(once)(*(g.clone() for g in once)), add=True
    )
    same(tuple(twice), tuple(2 * g for g in once))


@pytest.mark.bits
def test_a_fused_backward_pass_is_not_used_for_wide_heads() -> None:
    x, mask = qkv(16, dim=264, v_dim=512), MASKS["causal"](16, 16)
    start = cotangents(x)
    plain, fused = (run(x, mask, start=start, FUSED_BACKWARD=fused) for fused in (False, True))
    same(fused, plain)


def test_the_widest_heads_of_a_row_without_keys(engine: str) -> None:
    x = qkv(5, 16, dim=MAX_HEAD_DIM, v_dim=MAX_V_HEAD_DIM, dtype=F64)
    mask = tritoncp.create_block_mask(
        lambda b, h, q, kv: (q > 1) & (kv > 3), None, None, 5, 16, BLOCK_SIZE=16
    )
    got: Results = check(x, mask)
    assert bool((got.out[:, :, :2] == 0).all() and (got.lse[:, :, :2] == -math.inf).all())
