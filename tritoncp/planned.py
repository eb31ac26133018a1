"""`tritoncp plan`: from its options to a plan's facts, and onto the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.text import Text

import tritoncp
from tritoncp import expressions
from tritoncp.draw import Facts, colours, lines

USUAL = 128 << 10  # tokens, where nothing says how many


def planned(
    *,
    mask: str | None,
    lengths: str | None,
    seq_len: int | None,
    world_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None,
    batch: int | None,
    dtype: str,
    balancer: str,
    schedule: str,
    block_size: int,
) -> Facts:
    """The facts of rank 0's plan. ValueError says which option does not fit."""
    documents: Any = None if lengths is None else expressions.lengths(lengths)
    rows = documents if documents and isinstance(documents[0], list) else [documents or []]
    total = sum(rows[0])
    if total and seq_len not in (None, total):
        raise ValueError(f"--seq-len {seq_len}, but the documents of --lengths are {total} tokens together")
    size, batch = total or seq_len or USUAL, batch or len(rows)
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    mod = expressions.mask_of(mask or ("causal & document" if documents else "causal"), documents)
    made = tritoncp.make_plan(
        tritoncp.create_block_mask(mod, len(rows), 1, size, size, BLOCK_SIZE=block_size),
        world_size=world_size,
        rank=0,
        balancer=None if balancer == "natural" else balancer,
        schedule=schedule,
    )
    itemsize = getattr(torch, dtype).itemsize
    layer: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Facts.of(made, **layer, v_head_dim=v_head_dim or head_dim, itemsize=itemsize)


def write(facts: Facts, path: Path) -> None:
    from tritoncp.plot import html, paint

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(facts)) if path.suffix == ".html" else paint(facts).save(path)


def say(facts: Facts) -> None:
    """In the ranks' colours on a terminal; plain lines where there is none."""
    console = Console()
    if not console.is_terminal:
        click.echo("\n".join(line.text for line in lines(facts)))
        return
    paint = colours(facts.plan.world_size)
    for line in lines(facts):
        style = "" if line.rank is None else "rgb({},{},{})".format(*paint[line.rank])
        console.print(Text(line.text, style), soft_wrap=True)
