"""A script of a user with types that mypy --strict infers; tests/repo/test_typing.py runs and checks it."""

from typing import TYPE_CHECKING, assert_type

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import tritoncp

q = k = v = torch.randn(1, 2, 256, 16)
lengths = torch.tensor([0, 100, 256])


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - (q_idx - kv_idx) * torch.exp2(-(h + 1.0))


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 64)


mask = assert_type(tritoncp.create_block_mask(near, 1, 1, 256, 256), tritoncp.Mask)
plan = assert_type(tritoncp.make_plan(mask), tritoncp.Plan)
plans = assert_type(tritoncp.make_plan({"near": mask}, world_size=2), dict[str, tritoncp.Plan])
part = assert_type(tritoncp.shard(q, plan, dim=2), Tensor)
assert_type(tritoncp.unshard(part, plan, dim=2), Tensor)
assert_type(tritoncp.positions(plan), Tensor)

# Attention: in torch's order of arguments, and with the mask in fourth place.
assert_type(tritoncp.flex_attention(q, k, v, alibi, mask), Tensor)
assert_type(tritoncp.flex_attention(q, k, v, plan, None, 0.5), Tensor)
assert_type(tritoncp.flex_attention(q, k, v, tritoncp.causal(), return_lse=True), tuple[Tensor, Tensor])
aux = AuxRequest(lse=True, max_scores=True)
assert_type(tritoncp.flex_attention(q, k, v, plan, return_aux=aux), tuple[Tensor, AuxOutput])
x = q[0].transpose(0, 1)
assert_type(tritoncp.varlen_attention(x, x, x, lengths, causal=True), Tensor)
out, lse = tritoncp.varlen_attention(x, x, x, lengths, causal=True, return_lse=True)
assert_type(lse, Tensor)
out, packed_aux = tritoncp.varlen_attention(x, x, x, lengths, causal=True, return_aux=aux)
assert_type(packed_aux, AuxOutput)

if TYPE_CHECKING:  # names that do not exist, and wrong types, are errors of the type checker
    tritoncp.flex_atention(q, k, v)  # type: ignore[attr-defined]
    tritoncp.make_plan(mask, balancer="ptr")  # type: ignore[call-overload]
    tritoncp.make_plan(mask, schedule="rings")  # type: ignore[call-overload]
    tritoncp.make_plan(mask, "cp")  # type: ignore[call-overload]
    tritoncp.flex_attention(q, k, v, alibi, "causal")  # type: ignore[call-overload]
    tritoncp.flex_attention(q, k, v, mesh=3)  # type: ignore[call-overload]
    tritoncp.shard(q, "causal", dim=2)  # type: ignore[arg-type]

world = tritoncp.simulate(2)
dealt = assert_type(world.make_plan(mask), tritoncp.Plan)
halves = assert_type(world.shard(q, dealt, dim=2), list[Tensor])
assert_type(world.flex_attention(halves, halves, halves, dealt), list[Tensor])
outs, lses = world.flex_attention(halves, halves, halves, dealt, return_lse=True)
assert_type(lses, list[Tensor])
outs, world_aux = world.flex_attention(halves, halves, halves, dealt, return_aux=aux)
assert_type(world_aux.max_scores, list[Tensor] | None)
