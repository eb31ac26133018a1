"""Analysis of control flow: live registers between blocks, and an order of blocks in which divergent threads
reconverge."""

from __future__ import annotations

import networkx  # a dependency of torch

from tritoncp.executor.ptx.instruction import Kernel
from tritoncp.executor.ptx.opcodes import reads_and_writes


def liveness(kernel: Kernel) -> tuple[list[set[str]], list[set[str]]]:
    """Return the live registers at the start and at the end of each block."""
    reads, writes = [], []
    for block in kernel.blocks:
        read: set[str] = set()
        written: set[str] = set()
        for i in block.instructions:
            r, w = reads_and_writes(i, kernel.registers)
            read.update(x for x in r if x not in written)
            written.update(w)
        reads.append(read)
        writes.append(written)
    follows = kernel.successors()
    live_in = [set(r) for r in reads]
    live_out: list[set[str]] = [set() for _ in reads]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(len(reads))):
            out = set().union(*(live_in[s] for s in follows[n]))
            new = reads[n] | (out - writes[n])
            if out != live_out[n] or new != live_in[n]:
                live_out[n], live_in[n], changed = out, new, True
    return live_in, live_out


def meeting_order(kernel: Kernel) -> list[int]:
    """Rank the blocks so that divergent threads reconverge if the lowest rank runs first: a topological order
    in which each loop is contiguous and before its successors."""
    follows = kernel.successors()
    order: list[int] = []
    arrange(set(range(len(follows))), None, follows, order)
    rank = [0] * len(follows)
    for n, block in enumerate(order):
        rank[block] = n
    return rank


def arrange(nodes: set[int], header: int | None, follows: list[list[int]], order: list[int]) -> None:
    """Append blocks to `order` in topological order; within a loop, edges to its header are ignored."""
    edges = ((n, x) for n in nodes for x in follows[n] if x in nodes and x != header)
    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(nodes)
    loops = networkx.condensation(graph)
    members = {n: sorted(loops.nodes[n]["members"]) for n in loops}
    for n in networkx.lexicographical_topological_sort(loops, key=members.__getitem__):
        inside = set(members[n])
        if len(inside) == 1:
            order += inside
            continue
        entries = [x for n, after in enumerate(follows) if n not in inside for x in after if x in inside]
        arrange(inside, min(entries or inside), follows, order)
