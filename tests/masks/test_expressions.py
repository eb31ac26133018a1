"""Mask expressions are the masks they name, no code in them is run, and errors name the wrong part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.language import cdiv

from tritoncp import and_masks, causal, document, not_, or_masks, prefix_lm, sliding_window
from tritoncp.masks import expressions as texts
from tritoncp.masks.expressions import count, lengths, mask_of

SIZE = 48
DOCUMENTS = [5, 20, 23]
LEAVES = {
    "causal": causal(),
    "causal()": causal(),
    "full": sliding_window(-1, -1),
    "document": document(lengths=DOCUMENTS),
    "document(40, 8)": document(lengths=[40, 8]),
    "window(7)": sliding_window(7),
    "sliding_window(3, right=2)": sliding_window(3, 2),
    "window(-1, 4)": sliding_window(-1, 4),
    "prefix_lm(9)": prefix_lm(9),
    "prefix(1K)": prefix_lm(1024),
}
JOINS = {"&": and_masks, "|": or_masks, "and": and_masks, "or": or_masks}


def dense(mask) -> torch.Tensor:
    at = torch.arange(SIZE)
    return mask(torch.tensor(0), torch.tensor(0), at[:, None], at).expand(SIZE, SIZE)


@st.composite
def expressions(draw, depth: int = 3):
    """An expression as text, and the mask put together by hand."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(LEAVES)))
        return name, LEAVES[name]
    first, one = draw(expressions(depth - 1))
    if draw(st.integers(0, 2)) == 0:
        return f"{draw(st.sampled_from(['~', 'not ']))}({first})", not_(one)
    second, two = draw(expressions(depth - 1))
    sign = draw(st.sampled_from(sorted(JOINS)))
    return f"({first}) {sign} ({second})", JOINS[sign](one, two)


@given(expressions())
def test_an_expression_is_the_mask_it_names(made) -> None:
    text, want = made
    assert torch.equal(dense(mask_of(text, DOCUMENTS)), dense(want)), text


def test_operators_bind_as_in_python_and_closed_forms_stay_closed(monkeypatch) -> None:
    monkeypatch.setattr(texts, "MAX_DOCUMENT_TOKENS", SIZE)
    mask = mask_of("causal & window(7) | ~document & full", DOCUMENTS)
    outside = and_masks(not_(document(lengths=DOCUMENTS)), sliding_window(-1, -1))
    assert torch.equal(dense(mask), dense(or_masks(and_masks(causal(), sliding_window(7)), outside)))
    assert mask_of("causal & window(7) & document(40, 8)", DOCUMENTS).intervals(SIZE, SIZE) is not None
    assert mask_of("window(1024G)").window == (1 << 40, 0)


def test_a_mask_mod_of_the_user_is_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def near(b, h, q, kv):\n    return (q - kv).abs() < 3\nwidth = 3\n"
        "def odd():\n    pass\nodd.__signature__ = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert int(dense(mask_of("mine:near")).sum()) == 5 * SIZE - 6
    assert mask_of("triton.language:cdiv") is cdiv  # its use raises an error that names @triton.jit
    wrong = {"mine:far": "no attribute 'far'", "nobody:x": "No module", "mine:width": "is int"}
    wrong |= dict.fromkeys(("mine:odd", "builtins:iter"), "has no signature to check")
    for name, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            mask_of(name)


@pytest.mark.parametrize(
    ("text", "want"),
    [("3 5\n8", [3, 5, 8]), ("3,5, 8", [3, 5, 8]), ("1K 1024G", [1024, 1 << 40]), ("[3, 5]", [3, 5]),
     ("[[3, 5], [8, 0]]", [[3, 5], [8, 0]])],
)  # fmt: skip
def test_lengths_as_text_and_in_a_file(text: str, want: list, tmp_path) -> None:
    assert lengths(text) == want
    (tmp_path / "lengths.txt").write_text(text)
    assert lengths(str(tmp_path / "lengths.txt")) == want


def test_counts() -> None:
    assert [count(text) for text in ("7", "2k", "1.5K", "8M", "1G")] == [7, 2048, 1536, 8 << 20, 1 << 30]
