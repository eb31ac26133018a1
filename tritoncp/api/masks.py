"""The public `create_block_mask`, on the host and in compiled graphs."""

from __future__ import annotations

import torch

from tritoncp.core.dynamo_boundary import graph_entry
from tritoncp.masks import mask
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskFn


@graph_entry
def create_block_mask(
    mask_mod: MaskFn,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: str | torch.device | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> Mask:
    """Make a :class:`Mask` like torch's create_block_mask, without memory for Q_LEN x KV_LEN pairs.

    >>> mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), None, None, 2**20, 2**20)
    >>> print(f"{mask.sparsity():.1f} % of {mask.runs.shape[2]} x {mask.runs.shape[3]} blocks are empty")
    99.6 % of 8192 x 8192 blocks are empty
    >>> from tritoncp import causal, document
    >>> print(create_block_mask(causal() & document(lengths=[256, 128]), None, None, 384, 384).draw())
    ▒··
    █▒·
    ··▒
    >>> packed = causal() & document(lengths=[[256, 128], [128, 256]])      # documents of each batch row
    >>> create_block_mask(packed, 2, None, 384, 384).shape
    (2, 1, 384, 384)

    The blocks of a closed form (``causal()``, ``document(...)``, ...) follow from its parameters. Any other
    mask_mod is traced, and interval arithmetic bounds it over ever smaller tiles; only tiles that stay
    undecided are evaluated, a few million pairs at a time.

    Inside torch.compile, and in other traces if it depends on inputs of the graph, the mask is made when the
    graph runs, from the tensors and lengths of that run; the result is a handle for flex_attention. There
    mask_mod has to be defined outside of the compiled function, or capture no tensors; any other breaks the
    graph, and is an error under ``fullgraph=True``.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool, or a closed form such as ``causal()``.
        B: batch size, or None if the mask is the same for all batch rows.
        H: number of query heads, or None if the mask is the same for all heads.
        Q_LEN: number of queries of the whole sequence, over all ranks.
        KV_LEN: number of keys of the whole sequence.
        device: device on which mask_mod is evaluated; None: the device of the tensors that it captures.
        BLOCK_SIZE: tokens of a block, an int or (queries, keys).

    Returns:
        A :class:`Mask` on the CPU, which can be passed as block_mask; ``.to_block_mask()`` converts it to
        torch's.

    Raises:
        ValueError: for lengths or sizes out of range, and for a closed form of another number of batch rows.
        TypeError: for a mask_mod that is not a function or captures a DTensor, and for sizes that are not
            ints.
    """
    inside = torch.compiler.is_dynamo_compiling()
    if inside or torch._C._len_torch_dispatch_stack():
        from tritoncp.graph import handle_ops  # late: masks need few of the modules that it imports

        if not inside and not handle_ops.depends_on_inputs(mask_mod, (B, H, Q_LEN, KV_LEN)):
            return mask.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
        try:
            return handle_ops.trace_block_mask(mask_mod, (B, H, Q_LEN, KV_LEN), device, BLOCK_SIZE)  # type: ignore
        except TypeError as error:  # the mask_mod cannot be part of the graph
            if not inside:
                raise
            reason = error.args[0]
        torch._dynamo.graph_break(msg=reason)
    return mask.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
