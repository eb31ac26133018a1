"""The command `tritoncp plan`: makes a plan from its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tritoncp.masks import expressions
from tritoncp.masks.mask import create_block_mask
from tritoncp.planning.build import build
from tritoncp.report.facts import PlanFacts

DEFAULT_TOKENS = 128 << 10  # the sequence length without --seq-len or --lengths
# The largest plan that is made: it takes about a minute and 4 GiB.
MOST = {"tokens": 1 << 26, "blocks": 1 << 20, "ranks": 1 << 12, "pairs of a block and a rank": 1 << 28}


def check_size(tokens: int, blocks: int, world_size: int) -> None:
    """Raise ValueError for a plan that is too large to be made."""
    sizes = tokens, blocks, world_size, blocks * world_size
    if any(size > most for size, most in zip(sizes, MOST.values(), strict=True)):
        raise ValueError(
            f"{tokens} tokens in {blocks} blocks on {world_size} ranks: at most "
            f"{', '.join(f'{most} {name}' for name, most in MOST.items())} are planned; make --block-size "
            "larger or --world-size smaller"
        )


def collect_facts(
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
) -> PlanFacts:
    """Make rank 0's plan and return its facts. Raises ValueError that names the option that does not fit."""
    documents: Any = None if lengths is None else expressions.lengths(lengths)
    rows = documents if documents and isinstance(documents[0], list) else [documents or []]
    total = sum(rows[0])
    if documents and not total:
        raise ValueError("--lengths: the documents are 0 tokens together; a plan needs one token at least")
    if total and seq_len not in (None, total):
        raise ValueError(f"--seq-len {seq_len}, but the documents of --lengths are {total} tokens together")
    size = total or seq_len or DEFAULT_TOKENS
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    check_size(size * len(rows), -(-size // block_size) * len(rows), world_size)
    text = mask if mask is not None else "causal & document" if documents else "causal"
    mod = expressions.mask_of(text, documents)
    try:
        built = create_block_mask(mod, len(rows), 1, size, size, BLOCK_SIZE=block_size)
    except (Exception, SystemExit) as error:
        if not expressions.is_module_function(text):
            raise
        message = f"{type(error).__name__}: {error}"
        raise ValueError(f"--mask {text.strip()} cannot be evaluated as a mask_mod ({message})") from error
    plan = build(built, world_size, balancer=None if balancer == "natural" else balancer, schedule=schedule)
    expression = " ".join(text.split())
    if lengths is not None and len(lengths) <= 40 and not Path(lengths).is_file():
        expression += f", documents of {' '.join(lengths.split())}"
    layer: dict[str, Any] = {
        "batch": batch or len(rows),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    layer |= {"v_head_dim": v_head_dim or head_dim, "itemsize": getattr(torch, dtype).itemsize}
    return replace(PlanFacts.of(plan, **layer), expression=expression)
