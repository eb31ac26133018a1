"""`python -m tritoncp.chunking.figures`: what chunks and their order are worth, as a page.

The figures are predicted from graphs that are traced on fake tensors, in a minute or two on one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from tritoncp.chunking.command import balanced_hardware
from tritoncp.chunking.node_order import Order, order
from tritoncp.chunking.sample_graphs import Model, trace_model
from tritoncp.command_base import Command
from tritoncp.planning.cost import Hardware, hardware_of

TOKENS = (4096, 32768)
RANKS = (8, 64)
CUTS = {
    "whole": ("none", 1),
    "experts alone, sequence, 2": ("experts", 2),
    "block, batch, 2": ("batch", 2),
    "block, sequence, 2": ("sequence", 2),
    "block, sequence, 4": ("sequence", 4),
}
INTRODUCTION = """# Chunks and their order

Made by `python -m tritoncp.chunking.figures --out docs/chunking.md`. **Nothing here was timed on a GPU**:
every figure is predicted by `chunking.timeline.simulate` from a graph traced on fake tensors.

The graph is one forward and backward pass of {layers} layers of causal attention and experts in bfloat16:
width {dim}, {heads} heads, {experts} experts of {hidden}, {topk} for a token, spread over the ranks, which
each have {batch} rows of tokens. Experts get equally many tokens. Products are predicted from FLOPs,
attention from the visible blocks of its plan, messages from the bytes that a rank sends, and every other op
from the bytes that it reads and writes, without fusion, which overstates it. A message that travels while
nothing computes is *exposed*. Live bytes include parameters and their gradients, and not the optimizer.

*As written* is the order in which eager chunks run, one after another. *Ordered* is the result of
`chunking.node_order.order` without a limit of memory. The graphs are cut by hand, as eager code would.
"""
BALANCED = """## Messages a third of computation

{tokens} tokens a row, {ranks} ranks, on {hardware} with the bandwidth at which the messages of the whole
graph take a third of its computation, and no latency: the case in which order matters most."""
REAL = """## {tokens} tokens a row, {ranks} ranks

On {hardware}: {flops:.3g} FLOP/s, {bandwidth:.3g} bytes/s between ranks, of which {scattered:.0%} in an
all-to-all, {memory:.3g} bytes/s of device memory ({source}; memory: datasheets). Messages of the whole graph
take {share:.0%} of its computation."""


def order_cuts(model: Model, hardware: Hardware) -> dict[str, Order]:
    """Trace the model with every cut, and order the graphs."""
    return {name: order(trace_model(model, cut, chunks), hardware) for name, (cut, chunks) in CUTS.items()}


def format_orders(orders: dict[str, Order]) -> str:
    """Format predicted runs of several graphs as a table."""
    lines = [
        "| graph | as written, ms | exposed, ms | peak, MiB | ordered, ms | exposed, ms | peak, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, result in orders.items():
        cells = [
            figure
            for run in (result.before, result.after)
            for figure in (f"{run.makespan * 1e3:.1f}", f"{run.exposed * 1e3:.2f}", f"{run.peak / 2**20:.0f}")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_sections(tokens: Sequence[int], ranks: Sequence[int]) -> Iterator[str]:
    """Format the balanced case and a section for each number of tokens and ranks."""
    first = Model(tokens=tokens[0], ranks=ranks[0])
    hardware = balanced_hardware(first)
    name = hardware_of(ranks[0]).name
    yield BALANCED.format(tokens=first.tokens, ranks=first.ranks, hardware=name)
    yield format_orders(order_cuts(first, hardware))
    for count in tokens:
        for world in ranks:
            hardware = hardware_of(world)
            orders = order_cuts(Model(tokens=count, ranks=world), hardware)
            whole = orders["whole"].before
            figures: dict[str, Any] = {**vars(hardware), "hardware": hardware.name}
            yield REAL.format(tokens=count, ranks=world, share=whole.communication / whole.compute, **figures)
            yield format_orders(orders)


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
