"""Blocks in chunks under FSDP2 and under tensor parallelism, on two real ranks, with the bits of eager
chunking."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.chunking.models import compiled, in_chunks
from tests.chunking.test_trainers import WIDTH, Block, Model
from tests.multiprocess import ranks
from tritoncp.chunking import chunk, mark

B, S = 2, 32
pytestmark = pytest.mark.usefixtures("cpu_engine")


class FeedForward(nn.Module):
    """A norm of a rank's rows, and a feed-forward network of all ranks' rows, which are gathered for it and
    scattered after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64, False), nn.Linear(64, WIDTH, False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


ROWS_OF_RANK = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
SEQUENCE_PARALLEL = {
    "norm": SequenceParallel(),
    "mlp": ROWS_OF_RANK,
    "mlp.0": ColwiseParallel(),
    "mlp.1": RowwiseParallel(output_layouts=Shard(1)),
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and local gradients of a step."""
    out = model(x)
    out.square().sum().backward()
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [out.detach(), *grads]


def counted_step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Counter[str]]:
    """Count the collectives of the process group in a step, too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = step(model, x)
    return results, Counter(e.name for e in profile.events() if e.name.startswith("c10d::"))


def run_fsdp(group: Any) -> Any:
    """Shard a block that is compiled alone, and whose input a hook marks outside of its graph."""
    torch.manual_seed(0)
    mesh, model, reports = init_device_mesh("cpu", (2,)), Model(Block()), []
    eager = in_chunks(model, 2, "seq")
    model.layers[0] = compiled(model.layers[0], lambda gm: reports.append(chunk(gm, "", dim="seq")))
    model.layers[0].register_forward_pre_hook(lambda module, args: mark(args[0], 1, 2))
    for layers in (model.layers, eager.layers):
        fully_shard(layers[0], mesh=mesh)
    x = torch.randn(B, S, WIDTH) + group.rank()
    return counted_step(model, x), counted_step(eager, x), [report.live_outs for report in reports]


@pytest.mark.long
def test_fsdp2_gathers_parameters_once_for_all_chunks():
    for (got, sent), (want, sent_eagerly), joined in ranks.run(2, run_fsdp):
        assert all(map(torch.equal, got, want))
        assert sent == sent_eagerly and sent["c10d::_allgather_base_"] > 0
        assert joined == [{"cat": 2, "sum": 2}]


def run_tensor_parallel(group: Any) -> Any:
    torch.manual_seed(0)
    mesh, model, reports = init_device_mesh("cpu", (2,)), Model(FeedForward()), []
    whole = copy.deepcopy(model)
    for layers in (model.layers, whole.layers):
        parallelize_module(layers[0], mesh, {"mlp.0": ColwiseParallel(), "mlp.1": RowwiseParallel()})
    x = torch.randn(B, S, WIDTH)
    want = step(in_chunks(whole, 2, "seq"), x)
    mark(x, 1, 2)
    got = step(compiled(model, lambda gm: reports.append(chunk(gm, dim="seq"))), x)
    return got, want, reports[0].live_outs


@pytest.mark.long
def test_tensor_parallel_layers_are_cut_and_sum_the_tokens_of_a_chunk_between_ranks():
    for got, want, joined in ranks.run(2, run_tensor_parallel):
        assert all(map(torch.equal, got, want))
        assert joined["sum"] == 3


def run_sequence_parallel(group: Any, dim: str, chunks: int) -> Any:
    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (2,)), Model(FeedForward())
    whole = copy.deepcopy(model)
    for layers in (model.layers, whole.layers):
        parallelize_module(layers[0], mesh, SEQUENCE_PARALLEL)
    x = torch.randn(7, 7, WIDTH) + group.rank()
    want = step(in_chunks(whole, chunks, dim), x)
    mark(x, ("batch", "seq").index(dim), chunks)
    got = step(compiled(model, lambda gm: chunk(gm, dim=dim, chunks=chunks)), x)
    return got, want


@pytest.mark.long
@pytest.mark.parametrize(("dim", "chunks"), [("seq", 2), ("batch", 3), ("seq", 3)])
def test_chunks_of_sequence_parallel_layers_gather_their_rows(dim, chunks):
    for got, want in ranks.run(2, run_sequence_parallel, dim, chunks):
        assert all(map(torch.equal, got, want)) and len(got) == 6


def run_gathered_attention(group: Any) -> str:
    mesh, model = init_device_mesh("cpu", (2,)), Model(Block())
    gather = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )
    parallelize_module(model.layers[0], mesh, gather)
    x = torch.randn(B, S, WIDTH)
    mark(x, 1, 2)
    with pytest.raises(Exception, match="gathers rows of all ranks in a region with attention") as caught:
        compiled(model, lambda gm: chunk(gm, dim="seq"))(x)
    return str(caught.value)


@pytest.mark.long
def test_gathers_of_rows_for_attention_are_refused_by_sequence():
    assert all("node all_gather_into_tensor" in said for said in ranks.run(2, run_gathered_attention))
