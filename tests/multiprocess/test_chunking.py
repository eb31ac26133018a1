"""Chunks of a joint graph between two real ranks: the whole's answers, its messages, and one order of nodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.chunking import models
from tests.multiprocess import ranks
from tritoncp import causal, create_block_mask, make_plan, sliding_window
from tritoncp.chunking import chunk, mark, order
from tritoncp.chunking.node_order import order_digest
from tritoncp.chunking.report import ChunkingError
from tritoncp.distributed import collectives
from tritoncp.ops import engine_factory
from tritoncp.planning.cost import NVLINK

B, S, CHUNKS = 2, 64, 2
MASKS = {"causal": causal, "window": lambda: sliding_window(9)}


class Messages:
    """The collectives that a rank starts, and the bytes that it sends to the other of two ranks."""

    def __init__(self, group: Any) -> None:
        self.rank, self.count, self.bytes = group.rank(), 0, 0
        self.start = collectives._start

    def __enter__(self) -> Messages:
        collectives._start = self.record
        return self

    def __exit__(self, *error: Any) -> None:
        collectives._start = self.start

    def record(self, request: Any, group: Any) -> Any:
        self.count += 1
        match request:
            case collectives.AllGather(x):
                self.bytes += x.nbytes
            case collectives.ReduceScatter(x):
                self.bytes += x.nbytes // 2
            case collectives.AllToAll(x, sends):
                self.bytes += sends[1 - self.rank] * (x.nbytes // len(x)) if len(x) else 0
            case collectives.SendRecv(sends):
                self.bytes += sum(x.nbytes for _, x in sends)
        return self.start(request, group)


class Model(torch.nn.Module):
    """Layers of attention with residuals."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(models.Attention(models.Shape()) for _ in range(layers))

    def forward(self, x: Tensor, turn: Tensor, mask: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, turn, mask)
        return x.sin()


def step(group: Any, model: Any, call: Any, plan: Any, cut: bool) -> tuple[dict[str, Tensor], Messages]:
    """Run one training step on this rank's shard."""
    g = torch.Generator().manual_seed(1)
    x, turn, grad = (torch.randn(*size, generator=g) for size in ((B, S, 16), (S, 4), (B, S, 16)))
    x, grad = (tritoncp.shard(one, plan, dim=1) for one in (x, grad))
    turn = tritoncp.shard(turn, plan, dim=0, batch_dim=None)
    x = x.clone().requires_grad_()
    if cut:
        mark(x, 1, CHUNKS)
        mark(turn, 0, CHUNKS)
    with Messages(group) as messages:
        out = call(x, turn, plan)
        out.backward(grad)
    results = {"out": out.detach(), "dx": x.grad}
    return results | {f"d {name}": p.grad for name, p in model.named_parameters()}, messages


def one_rank(group: Any, schedule: str, kind: str, balancer: str | None, repeat: bool) -> Any:
    """Compare a step in chunks with the whole's; return messages of both, the report, and the digest of the
    order of the nodes."""
    engine_factory.uses_triton = lambda device: False  # this process ends with the test
    models.Attention.mesh = group
    mask = create_block_mask(MASKS[kind](), None, None, S, S, BLOCK_SIZE=8)
    plan = make_plan(mask, group, schedule=schedule, balancer=balancer)
    torch.manual_seed(0)
    model = Model()
    other = copy.deepcopy(model)
    want, whole = step(group, model, model, plan, cut=False)
    reports, digests = [], []

    def rewrite(gm: torch.fx.GraphModule) -> None:
        reports.append(chunk(gm, dim="seq", chunks=CHUNKS, repeat=repeat))

    def finish(gm: torch.fx.GraphModule) -> None:
        if not repeat:
            order(gm, NVLINK)
            digests.append(order_digest(gm))

    call = models.compiled(other, rewrite, finish=finish)
    results, parts = step(group, other, call, plan, cut=True)
    assert want.keys() == results.keys()
    for name in want:
        torch.testing.assert_close(results[name], want[name], atol=2e-5, rtol=1e-5, msg=name)
    return (whole.count, whole.bytes), (parts.count, parts.bytes), reports[0], digests


@pytest.mark.parametrize("schedule", ["allgather", "fetch"])
def test_keys_travel_once(schedule: str) -> None:
    for kind, balancer in (("causal", "head_tail"),):
        for x in ranks.run(2, one_rank, schedule, kind, balancer, False):
            print(x)
