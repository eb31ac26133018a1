"""Mask expressions are the masks they name, nothing in them is run, and mistakes point at the place."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritoncp.masks import and_masks, causal, document, not_, or_masks, prefix_lm, sliding_window
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
    sign, join = draw(
        st.sampled_from([("&", and_masks), ("|", or_masks), ("and", and_masks), ("or", or_masks)])
    )
    return f"({first}) {sign} ({second})", join(one, two)


@given(expressions())
def test_an_expression_is_the_mask_it_names(made) -> None:
    text, want = made
    assert torch.equal(dense(mask_of(text, DOCUMENTS)), dense(want)), text


def test_operators_bind_as_in_python() -> None:
    found = mask_of("causal & window(7) | ~document & full", DOCUMENTS)
    want = or_masks(
        and_masks(causal(), sliding_window(7)), and_masks(not_(document(lengths=DOCUMENTS)), causal())
    )
    assert not torch.equal(dense(found), dense(want)), "full is not causal"
    others = and_masks(not_(document(lengths=DOCUMENTS)), sliding_window(-1, -1))
    want = or_masks(and_masks(causal(), sliding_window(7)), others)
    assert torch.equal(dense(found), dense(want))


def test_closed_forms_stay_closed() -> None:
    assert mask_of("causal & window(7) & document", DOCUMENTS).intervals(SIZE, SIZE) is not None
    assert mask_of("window(4K)").window == (4096, 0)


@pytest.mark.parametrize(
    ("text", "said", "marked"),
    [
        ("causal & cusal", "no mask is called 'cusal'; known: causal", "cusal"),
        ("window()", "it is window(left, right=0)", "window()"),
        ("full(3)", "it is full alone", "full(3)"),
        ("window(1.5)", "this has to be a whole number", "1.5"),
        ("window(causal)", "this has to be a whole number", "causal"),
        ("window(-2)", "give 0 or more, or -1", "window(-2)"),
        ("causal + full", "a mask is a name, a call of one", "causal + full"),
        ("causal & 3", "a mask is a name, a call of one", "3"),
        ("full & document", "document needs to know the documents", "document"),
        ("__import__('os').getcwd()", "a mask is a name, a call of one", "__import__('os').getcwd()"),
        ("(lambda: 0)()", "a mask is a name, a call of one", "(lambda: 0)()"),
        ("causal.__class__", "a mask is a name, a call of one", "causal.__class__"),
        ("causal & (full", "this is no mask expression", "("),
        ("", "this is no mask expression", ""),
    ],
)
def test_mistakes_point_at_the_place(text: str, said: str, marked: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        mask_of(text)
    message, line, marks = str(caught.value).split("\n")
    assert message and line.strip() == text.strip()
    start, end = marks.index("^") - 4, len(marks) - 4
    assert text[start:end] == marked


def test_a_mask_mod_of_ones_own(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text("def near(b, h, q, kv):\n    return (q - kv).abs() < 3\nwidth = 3\n")
    monkeypatch.chdir(tmp_path)
    assert int(dense(mask_of("mine:near")).sum()) == 5 * SIZE - 6
    wrong = {"mine:far": "no attribute 'far'", "nobody:x": "No module", "mine:width": "is int"}
    for name, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            mask_of(name)


@pytest.mark.parametrize(
    ("text", "want"),
    [("3 5\n8", [3, 5, 8]), ("3,5, 8", [3, 5, 8]), ("1K 24", [1024, 24]), ("[3, 5]", [3, 5]),
     ("[[3, 5], [8, 0]]", [[3, 5], [8, 0]])],
)  # fmt: skip
def test_lengths_as_text_and_in_a_file(text: str, want: list, tmp_path) -> None:
    assert lengths(text) == want
    (tmp_path / "lengths.txt").write_text(text)
    assert lengths(str(tmp_path / "lengths.txt")) == want


@pytest.mark.parametrize("text", ["", " , ", "3 x", "3.5", "-1", "[3, -1]", "[1.5]", '{"a": 1}', "[[3], 5]"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        lengths(text)


def test_counts() -> None:
    assert [count(text) for text in ("7", "2k", "1.5K", "8M", "1G")] == [7, 2048, 1536, 8 << 20, 1 << 30]
    for text in ("", "K", "1.0001K", "-3", "1e6", "1T"):
        with pytest.raises(ValueError, match="no whole number of tokens"):
            count(text)
