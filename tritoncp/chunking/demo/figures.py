"""`python -m tritoncp.chunking.demo.figures`: what chunks and their order are worth, as a page.

The figures are predicted from graphs that are captured on meta tensors, in a few minutes on one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from torch.fx import Graph, GraphModule

from tritoncp.chunking.demo.command import balanced_hardware
from tritoncp.chunking.demo.sample_graphs import Model, capture_graphs, cut_graph
from tritoncp.chunking.streams.node_order import Order, order
from tritoncp.chunking.streams.timeline import Timeline
from tritoncp.command_base import Command
from tritoncp.planning.cost import Hardware, hardware_of

TOKENS = (4096, 32768)
RANKS = (8, 64)
CUTS = {
    "whole": ("sequence", 1),
    "experts alone, sequence, 2": ("experts", 2),
    "block, batch, 2": ("batch", 2),
    "block, sequence, 2": ("sequence", 2),
    "block, sequence, 4": ("sequence", 4),
}
INTRODUCTION = """# Graph chunking

Made by `python -m tritoncp.chunking.demo.figures --out docs/chunking.md`.
**Nothing here was timed on a GPU**: every figure is predicted by `tritoncp.chunking.simulate`
from a graph captured on meta tensors.

## What the pass does

`tritoncp.chunking.chunk` cuts the layers of a training graph, forward and backward together, into chunks of
the batch or of the sequence, through attention. Each chunk has its own copy of the nodes that depend on its
rows; what depends on parameters alone is shared. By sequence, the queries of a chunk read the keys of the
chunks that the mask lets them see. Gradients of parameters are summed over chunks, the last first, as
autograd does; counters of tokens go from chunk to chunk. Results are those of `tritoncp.chunking.Eager`,
which runs a module once a chunk without a graph. `tritoncp.chunking.order` then reorders the nodes, so that
the exchange of one chunk runs under the computation of another: most of the gain comes from the order.

## How to use it

<!-- fragment: the model and its inputs are yours -->
```python
import torch
from tritoncp.chunking import Pass, mark

mark(x, 1, 2)  # [B, S, ...]: the sequence becomes a symbol that 2 chunks divide
mark(positions, 0, 2)  # the same size of every input
step = torch.compile(model, options={{"joint_custom_pre_pass": Pass("layers.*", dim="seq", chunks=2)}})
```

With a backend of your own, call `chunk(gm, "layers.*", dim="seq")` on the joint graph in the partition
function of AOTAutograd, and `order(gm, hardware)` on the forward and on the backward graph in their
compilers: the partitioner changes the order, so that one before it is lost. `print(chunk(...))` is the table
of what was done, and `Pass.reports` has it for each graph that was cut; it is empty if inductor took the
compiled graph from its cache. `concretise(gm)` puts numbers in place of the symbol. Chunks of other sizes
that the number of chunks does not divide are an error when the graph runs.

Refused, each with the node and the reason, and the graph left as it was: a backward graph alone; a value
without rows that leaves a region and is no gradient or new value of an input, as a mean over tokens; random
ops; torch's attention; two dimensions of the size that is cut; a constant in place of the size; collectives
other than exchanges of experts; attention between ranks by a ring or Ulysses, unless `repeat=True` accepts
that each chunk sends the keys again. Under `allgather` and `fetch` the chunks share one exchange.

Not refused, and different from the whole: an operation across rows other than attention, as a convolution, a
scan or a mean along the sequence whose result stays in the region, sees the rows of its chunk alone. So it
is in `Eager`, which is the reference.

## The graph of the figures

It is one forward and backward pass of {layers} layers of causal attention and experts in bfloat16:
width {dim}, {heads} heads, {experts} experts of {hidden}, {topk} for a token, spread over the ranks, which
each have {batch} rows of tokens. Experts get equally many tokens. Products are predicted from FLOPs,
attention from the visible blocks of its plan, messages from the bytes that a rank sends, and every other op
from the bytes that it reads and writes, without fusion, which overstates it. A message that travels while
nothing computes is *exposed*. Live bytes include parameters and their gradients, and not the optimizer.

*As written* is the order of the pass, one chunk after another. *Ordered* is the result of
`tritoncp.chunking.order` without a limit of memory. The first table is of joint graphs. The second is of the
forward and the backward graph that AOTAutograd's default partitioner makes of the joint graph, each ordered:
times are sums of both, the peak is the higher one, with all inputs of a graph alive until its end.
"""
BALANCED = """## Messages a third of computation

{tokens} tokens a row, {ranks} ranks, on {hardware} with the bandwidth at which the messages of the whole
graph take a third of its computation, and no latency: the case in which order matters most."""
REAL = """## {tokens} tokens a row, {ranks} ranks

On {hardware}: {flops:.3g} FLOP/s, {bandwidth:.3g} bytes/s between ranks, of which {scattered:.0%} in an
all-to-all, {memory:.3g} bytes/s of device memory ({source}; memory: datasheets). Messages of the whole graph
take {share:.0%} of its computation."""


class Orders(NamedTuple):
    """A joint graph in two orders, and the forward and backward graphs that the partitioner makes of it."""

    joint: Order
    parts: list[Order]


Figures = tuple[float, float, float]  # seconds, of which exposed, and bytes


def order_cut(model: Model, hardware: Hardware, cut: str, chunks: int) -> Orders:
    """Capture the model, cut it if there are several chunks, and order the joint graph, and the two graphs
    that the partitioner makes of the joint graph as written."""
    joint: list[Order] = []
    parts: list[Order] = []

    def edit(gm: GraphModule) -> None:
        if chunks > 1:
            cut_graph(gm, cut, chunks)
        joint.append(order(copy_graph(gm), hardware))

    capture_graphs(model, cut, edit, lambda gm: parts.append(order(gm, hardware)))
    return Orders(joint[0], parts)


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy a graph, so that the nodes of one can be ordered and those of the other partitioned."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def order_cuts(model: Model, hardware: Hardware) -> dict[str, Orders]:
    """Order the model's graphs with every cut."""
    return {name: order_cut(model, hardware, cut, chunks) for name, (cut, chunks) in CUTS.items()}


def figures_of(*runs: Timeline) -> Figures:
    """Sum the seconds of runs one after another, and take their highest peak."""
    return sum(run.makespan for run in runs), sum(run.exposed for run in runs), max(run.peak for run in runs)


def format_table(title: str, rows: dict[str, tuple[Figures, Figures]]) -> str:
    """Format predicted runs of several graphs, as written and ordered."""
    lines = [
        f"| {title} | as written, ms | exposed, ms | peak, MiB | ordered, ms | exposed, ms | peak, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, runs in rows.items():
        cells = [
            figure
            for seconds, exposed, peak in runs
            for figure in (f"{seconds * 1e3:.1f}", f"{exposed * 1e3:.2f}", f"{peak / 2**20:.0f}")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_orders(orders: dict[str, Orders]) -> Iterator[str]:
    """Format the table of joint graphs, and that of forward and backward graphs."""
    joint = {n: (figures_of(x.joint.before), figures_of(x.joint.after)) for n, x in orders.items()}
    yield format_table("joint graph", joint)
    parts = {
        name: (figures_of(*(x.before for x in one.parts)), figures_of(*(x.after for x in one.parts)))
        for name, one in orders.items()
    }
    yield format_table("forward and backward graphs", parts)


def format_sections(tokens: Sequence[int], ranks: Sequence[int]) -> Iterator[str]:
    """Format the balanced case and a section for each number of tokens and ranks."""
    first = Model(tokens=tokens[0], ranks=ranks[0])
    hardware = balanced_hardware(first)
    name = hardware_of(ranks[0]).name
    yield BALANCED.format(tokens=first.tokens, ranks=first.ranks, hardware=name)
    yield from format_orders(order_cuts(first, hardware))
    for count in tokens:
        for world in ranks:
            hardware = hardware_of(world)
            orders = order_cuts(Model(tokens=count, ranks=world), hardware)
            whole = orders["whole"].joint.before
            figures: dict[str, Any] = {**vars(hardware), "hardware": hardware.name}
            yield REAL.format(tokens=count, ranks=world, share=whole.communication / whole.compute, **figures)
            yield from format_orders(orders)


def format_page(tokens: Sequence[int] = TOKENS, ranks: Sequence[int] = RANKS) -> str:
    """Format the page."""
    return "\n\n".join([INTRODUCTION.format(**vars(Model())).strip(), *format_sections(tokens, ranks)]) + "\n"


@click.command(cls=Command)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the page goes.  [default: stdout]"
)
def main(out: Path | None) -> None:
    """Predict what chunks of a training graph and their order are worth, at real sizes."""
    page = format_page()
    if out is None:
        click.echo(page, nl=False)
    else:
        out.write_text(page)


if __name__ == "__main__":
    main()
