"""Errors of mask_mods and score_mods that cannot run on pairs: each names the user's line and the remedy."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import tritoncp

T = torch.arange(128)
MISTAKES = {
    "if": (lambda b, h, q, kv: q >= 0 if q >= kv else q < 0, "`if`.*torch.where"),
    "and": (lambda b, h, q, kv: q >= kv and kv > 3, "`and`.*& | ~"),
    "not": (lambda b, h, q, kv: not q >= kv, "`not`.*& | ~"),
    "chained comparison": (lambda b, h, q, kv: 0 <= q <= kv, r"\(0 <= q_idx\) & \(q_idx < 8\)"),
    "item": (lambda b, h, q, kv: q.item() >= kv, r"Tensor\.item\(\).*capture a Python number"),
    "int": (lambda b, h, q, kv: int(q) >= kv, r"int\(\)"),
    "float": (lambda b, h, q, kv: float(q) >= kv, r"float\(\)"),
    "bool": (lambda b, h, q, kv: bool(q >= kv), r"bool\(\)"),
    "tolist": (lambda b, h, q, kv: q.tolist() >= kv, r"Tensor\.tolist\(\)"),
    "list": (lambda b, h, q, kv: kv >= [1, 2][q], "index into a list"),
    "range": (lambda b, h, q, kv: kv >= len(range(q)), r"range\(\)"),
    "slice": (lambda b, h, q, kv: T[:q].sum() > kv, r"Tensor\.item\(\)"),
    "index by bools": (lambda b, h, q, kv: T[q < T].sum() > kv, "shape of its result depends on data"),
    "random": (lambda b, h, q, kv: torch.rand(()) > 0.5, "random numbers differ at every evaluation"),
    "equal": (lambda b, h, q, kv: torch.equal(q, kv), "== for torch.equal"),
    "allclose": (lambda b, h, q, kv: torch.allclose(q, kv), "== for torch.equal"),
    "edit in place": (lambda b, h, q, kv: q.clone().add_(kv) > 3, r"write x = x \+ y for x \+= y"),
    "None": (lambda b, h, q, kv: None, "returns None; a bool tensor is needed: return"),
    "int result": (lambda b, h, q, kv: 1, "returns 1, of type int; a bool tensor is needed"),
    "tuple": (lambda b, h, q, kv: (q >= kv,), "of type tuple; a bool tensor is needed"),
    "int tensor": (lambda b, h, q, kv: q - kv, r"returns torch\.int64; a mask_mod must return bool: compare"),
    "float tensor": (lambda b, h, q, kv: (q >= kv).float(), r"returns torch\.float32; .* must return bool"),
    "vector": (lambda b, h, q, kv: q <= T, r"returns a tensor \[128\]; one value for a pair is needed"),
}


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
    "from_block_mask": lambda mod: tritoncp.from_block_mask(listed(mod)),
    "make_plan": lambda mod: tritoncp.make_plan(listed(mod), world_size=2),
}


@pytest.mark.parametrize(
    ("name", "use"), [*((name, "create_block_mask") for name in MISTAKES), *(("if", use) for use in USES)]
)
def test_a_mask_mod_that_cannot_run_on_pairs_is_refused_at_its_line_with_the_remedy(name, use) -> None:
    mod, remedy = MISTAKES[name]
    with pytest.raises(TypeError, match=remedy) as error:
        USES[use](mod)
    assert f"{__file__}:{mod.__code__.co_firstlineno} " in str(error.value)
    assert "file an issue" not in str(error.value) and "vmap(" not in str(error.value)


def test_a_python_bool_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(TypeError, match="returns True, of type bool; a bool tensor is needed"):
        create(lambda b, h, q, kv: True)


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
