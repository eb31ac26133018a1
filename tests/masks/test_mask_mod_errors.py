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
    """Also each of tests/call/mistakes.toml, where there is no line."""

    def mod(b, h, q, kv):
        return q >= 0 if q >= kv else q < 0

    with pytest.raises(TypeError, match=r"`if`.*torch\.where") as error:
        USES[use](mod)
    assert f"{__file__}:{mod.__code__.co_firstlineno + 1} " in str(error.value)
    assert "file an issue" not in str(error.value) and "vmap(" not in str(error.value)


WRITES = {
    "a constant": lambda t, q: t.__setitem__(0, 1),
    "a constant through a view": lambda t, q: t[:4].fill_(3),
    "a value of the pair": lambda t, q: t.__setitem__(0, q),
    "in place": lambda t, q: t.add_(1),
    "data": lambda t, q: t.data.zero_(),
    "out": lambda t, q: torch.add(t, 1, out=t),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("write", WRITES)
def test_a_mask_mod_that_writes_to_a_capture_is_refused_before_it_writes(use, write) -> None:
    table = torch.arange(256)

    def mod(b, h, q, kv):
        WRITES[write](table, q)
        return q >= table[kv]

    with pytest.raises(TypeError, match=r"must not write to what it captures.*edit the tensor") as error:
        USES[use](mod)
    assert __file__ in str(error.value)
    assert torch.equal(table, torch.arange(256))


def test_a_mask_mod_may_write_to_a_tensor_that_it_makes() -> None:
    def mod(b, h, q, kv):
        limits = torch.zeros(2, dtype=torch.int64)
        limits[1] = 5
        return q >= kv + limits[1] - limits[0]

    q, kv = torch.arange(128)[:, None], torch.arange(128)
    assert torch.equal(create(mod).to_dense()[0, 0], q >= kv + 5)


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
