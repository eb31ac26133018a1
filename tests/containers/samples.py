"""Masks, plans and closed forms of all kinds, for laws about containers of other libraries."""

import torch

import tritoncp
from tritoncp import causal, create_block_mask, document, make_plan, not_, prefix_lm, sliding_window, tree
from tritoncp.masks.closed_forms import PartOfMask

S, BLOCK = 64, 16
IDS = torch.arange(S) // 20


def near(b, h, q, kv):
    """A mask_mod without a closed form."""
    return (q >= kv) & ((q * kv) % 7 != 1)


def mask_of(mod):
    return create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=BLOCK)


def near_table(ids):
    """Make a mask_mod that captures a tensor."""

    def mod(b, h, q, kv):
        return (q >= kv) & (ids[q] <= ids[kv] + 1)

    return mod


def packed():
    lengths = torch.tensor([0, 30, S])
    return tritoncp.varlen_mask(lengths, causal=True, BLOCK_SIZE=BLOCK).mask_mod


CLOSED_FORMS = {
    "causal": causal,
    "window": lambda: sliding_window(9, 3),
    "documents": lambda: document(ids=IDS),
    "prefix": lambda: prefix_lm(12),
    "prefixes": lambda: prefix_lm(torch.tensor([12])),
    "and": lambda: causal() & document(lengths=[10, 54]),
    "or": lambda: sliding_window(4) | document(ids=IDS),
    "not": lambda: causal() & not_(sliding_window(5)) | sliding_window(1),
    "with a function": lambda: causal() & near,
    "selection": lambda: PartOfMask(document(ids=torch.stack([IDS, IDS // 2])), rows=(1,)),
    "tree": lambda: tree([-1, 0, 0], [24, 20, 20]),
    "varlen": packed,
}
MASKS = {
    "mask": lambda: mask_of(causal() & document(ids=IDS)),
    "mask of a function": lambda: mask_of(near),
    "mask with a capture": lambda: mask_of(near_table(IDS)),
    "full mask": lambda: tritoncp.full_mask(S, S, block=BLOCK),
    "plan": lambda: make_plan(mask_of(document(ids=IDS))),
    "plan with parts": lambda: make_plan(create_block_mask(near, 2, 1, S, S, BLOCK_SIZE=BLOCK))[0],
}
SAMPLES = {
    **CLOSED_FORMS,
    **MASKS,
    "dict of plans": lambda: {"full": MASKS["plan"](), "near": make_plan(mask_of(near))},
}


def attend(x, mask):
    """Attend with a mask, or with each of a dict."""
    if isinstance(mask, dict):
        return torch.stack([attend(x, one) for one in mask.values()])
    return tritoncp.flex_attention(x, x, x, mask)


def x_of(seed=0):
    return torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(seed))
