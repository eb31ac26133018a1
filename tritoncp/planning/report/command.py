"""The command `tritoncp plan`: makes a plan from its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tritoncp.masks import expressions
from tritoncp.masks.create import create_on_device
from tritoncp.planning.build import build
from tritoncp.planning.report.facts import Facts

DEFAULT_TOKENS = 128 << 10  # the sequence length without --seq-len or --lengths
# A plan takes about 60 bytes a token, 2 KiB a block, 25 bytes a pair of ranks and a byte for each block of
# each rank ("pairs"): each limit is about a minute and 4 GiB.
LIMITS = {"tokens": 1 << 26, "blocks": 1 << 20, "ranks": 1 << 12, "pairs": 1 << 28}


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
) -> Facts:
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
    check_size(size, len(rows), block_size, world_size)
    text = mask if mask is not None else "causal & document" if documents else "causal"
    mod = expressions.mask_of(text, documents)
    try:
        built = create_on_device(mod, len(rows), 1, size, size, None, block_size)
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
    return replace(Facts.of(plan, **layer), expression=expression)


def check_size(tokens: int, rows: int, block: int, ranks: int) -> None:
    """Raise ValueError for a plan that would take more memory or time than LIMITS allows.

    >>> check_size(1 << 20, 1, 128, 64)
    >>> check_size(1 << 20, 1, 128, 10**6)
    Traceback (most recent call last):
    ValueError: --world-size 1000000: the command plans for 4096 ranks at most
    """
    if ranks > LIMITS["ranks"]:
        raise ValueError(f"--world-size {ranks}: the command plans for {LIMITS['ranks']} ranks at most")
    if tokens * rows > LIMITS["tokens"]:
        raise ValueError(f"{tokens} tokens in {rows} batch rows: at most {LIMITS['tokens']} are planned")
    blocks = -(-tokens // block) * rows
    if blocks > LIMITS["blocks"] or blocks * ranks > LIMITS["pairs"]:
        most = min(LIMITS["blocks"], LIMITS["pairs"] // ranks)
        raise ValueError(
            f"{blocks} blocks of {block} tokens for {ranks} ranks: at most {most} are planned; "
            "make --block-size larger"
        )
