"""Errors of mask_mods and score_mods that cannot run on pairs: each names the user's line and the remedy."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import tritoncp

T = torch.arange(128)


def create(mod):
    return tritoncp.create_block_mask(mod, 1, 1, 128, 128)


def listed(mod):
    """A BlockMask of one masked block in each of two rows."""
    num, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    return flex.BlockMask.from_kv_blocks(num, index, mask_mod=mod, seq_lengths=(256, 256))


def attend(mask):
    x = torch.zeros(1, 1, 256, 16)
    return tritoncp.flex_attention(x, x, x, block_mask=mask)


USES = {
    "create_block_mask": create,
    "and_masks": lambda mod: create(tritoncp.and_masks(mod, tritoncp.causal())),
    "& of a closed form": lambda mod: attend(tritoncp.causal() & mod),
    "or_masks": lambda mod: create(tritoncp.or_masks(tritoncp.causal(), mod)),
    "not_": lambda mod: create(tritoncp.not_(mod)),
    "raw BlockMask": lambda mod: attend(listed(mod)),
    "from_block_mask": lambda mod: attend(tritoncp.from_block_mask(listed(mod))),
    "make_plan": lambda mod: attend(tritoncp.make_plan(listed(mod))),
}


@pytest.mark.parametrize("use", USES)
def test_a_mask_mod_that_cannot_run_on_pairs_is_refused_at_its_line_with_the_remedy(use) -> None:
    """Also each of tests/api/mistakes.toml, where there is no line."""

    def mod(b, h, q, kv):
        return q >= 0 if q >= kv else q < 0

    with pytest.raises(TypeError, match=r"`if`.*torch\.where") as error:
        USES[use](mod)
    assert f"{__file__}:{mod.__code__.co_firstlineno + 1} " in str(error.value)
    assert "file an issue" not in str(error.value) and "vmap(" not in str(error.value)


@pytest.mark.parametrize("value", [True, False])
def test_python_bools_combine_as_in_torchs_and_masks(value) -> None:
    mods = (lambda b, h, q, kv: value), (lambda b, h, q, kv: q >= kv)
    for combine, theirs in ((tritoncp.and_masks, flex.and_masks), (tritoncp.or_masks, flex.or_masks)):
        ours = create(combine(*mods)).to_dense()
        assert torch.equal(ours, flex.create_mask(theirs(*mods), 1, 1, 128, 128, device="cpu"))
    assert bool((create(tritoncp.not_(mods[0])).to_dense() == (not value)).all())


def test_an_error_of_the_mask_mod_itself_passes() -> None:
    with pytest.raises(ZeroDivisionError):
        create(lambda b, h, q, kv: q >= 1 // 0)
    with pytest.raises(IndexError):
        create(lambda b, h, q, kv: T[q + 1000] > kv)
