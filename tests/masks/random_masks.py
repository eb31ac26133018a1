"""Random maps of blocks, lengths and mask_mods, and the visible pairs by definition, for tests of masks."""

import torch
from einops import reduce, repeat
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tests.draws import few
from tests.zoo import MASKS, Sizes
from tritoncp.masks import ABSENT, Kind, Mask

FEW = few()


class MaskText:
    """A drawn mask_mod with its text and tables, for the message of a failure."""

    def __init__(self, text: str, captures: dict[str, Tensor]) -> None:
        self.text, self.captures = text, captures
        scope = {"torch": torch, **captures}
        exec(f"def mod(b, h, q, kv):\n    return {text}", scope)
        self.mod = scope["mod"]

    def __repr__(self) -> str:
        return f"{self.text}   with {self.captures}"


@st.composite
def kinds_maps(draw: st.DrawFn) -> Tensor:
    """Dense kinds uint8 [B, H, R, C]: noise, or long runs, from nearly empty to full."""
    b, h, r, c = (draw(st.integers(1, n)) for n in (2, 3, 9, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    kinds = torch.randint(0, 4, (b, h, r, c), generator=g, dtype=torch.uint8)
    if draw(st.booleans()):
        kinds = kinds.sort(dim=draw(st.sampled_from([2, 3]))).values
    kinds[torch.rand(b, h, r, c, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = ABSENT
    return kinds


@st.composite
def geometries(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(q_len, kv_len, q_block, kv_block), ragged more often than not."""
    return tuple(draw(st.integers(*bounds)) for bounds in ((1, 40), (1, 40), (3, 9), (3, 9)))


def make_mask_mod(seed: int, q_len: int, kv_len: int):
    """Return a mask_mod of the zoo by its seed. Its tables are as long as the sequences: an index past them
    raises."""
    names = "bits", "windows of heads", "hidden rows", "blocks of heads", "dilated"
    return MASKS[names[seed % 5]](Sizes(2, 3, q_len, kv_len), seed).mod


def kinds_of_pairs(visible: Tensor, q_block: int, kv_block: int) -> Tensor:
    """Return the kinds of blocks of visible pairs [B, H, Q, KV]; one that the end cuts is not full."""
    pad = 0, -visible.shape[3] % kv_block, 0, -visible.shape[2] % q_block
    padded = torch.nn.functional.pad(visible, pad).long()
    count = reduce(padded, "b h (r i) (c j) -> b h r c", "sum", i=q_block, j=kv_block)
    kinds = torch.where(count == 0, ABSENT, torch.where(count == q_block * kv_block, Kind.FULL, Kind.MASKED))
    return kinds.to(torch.uint8)


def at_pairs(blocks: Tensor, mask: Mask) -> Tensor:
    """Return the value of each pair's block: [B, H, q_len, kv_len] of [B, H, rows, cols]."""
    pairs = repeat(blocks, "b h r c -> b h (r i) (c j)", i=mask.q_block, j=mask.kv_block)
    return pairs[:, :, : mask.q_len, : mask.kv_len]


def visible_by_definition(mod, kinds: Tensor, mask: Mask) -> Tensor:
    """Return the pairs that are listed and not hidden by the mask_mod in a MASKED block: bool, dense."""
    b, h = kinds.shape[:2]
    fine = at_pairs(kinds, mask)
    visible = flex.create_mask(mod, b, h, mask.q_len, mask.kv_len, device="cpu")
    return (fine == Kind.FULL) | (fine == Kind.BOUNDED) | (fine == Kind.MASKED) & visible


def assert_same_lists(a: flex.BlockMask, b: flex.BlockMask) -> None:
    for side in ("kv", "full_kv", "q", "full_q"):
        num, num2 = (getattr(m, f"{side}_num_blocks") for m in (a, b))
        indices, indices2 = (getattr(m, f"{side}_indices") for m in (a, b))
        assert torch.equal(num, num2), side
        listed = torch.arange(indices.shape[-1]) < num[..., None]
        assert torch.equal(indices[listed], indices2[listed]), side
