"""Tests of the record of selected keys."""

from __future__ import annotations

import pytest
import torch

from tritoncp.selection.selection import Selection, check_indices, check_selection

QUERY = torch.zeros(2, 4, 8, 16)


def check(chosen: Selection) -> None:
    """Check a selection for a call with 2 KV heads and a sequence of 40 keys."""
    check_selection(chosen, QUERY, 2)
    check_indices(chosen, 40)


def test_unique_indices_select_the_same_pairs() -> None:
    g = torch.Generator().manual_seed(1)
    chosen = Selection(torch.randint(-1, 6, (2, 3, 5, 8), generator=g), 16, 2)
    unique = chosen.unique()
    assert torch.equal(unique.to_dense(90), chosen.to_dense(90))
    ordered = unique.indices
    assert bool(((ordered[..., 1:] > ordered[..., :-1]) | (ordered[..., :-1] == -1)).all())


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (torch.zeros(1, 1, 8, 2), "pass tritoncp.Selection"),
        (Selection(torch.zeros(1, 1, 8, 2)), "int32 or int64 tensor is needed"),
        (Selection(torch.zeros(1, 1, 8, 2).int(), 8), "1 or a multiple of 16"),
        (Selection(torch.zeros(1, 1, 8, 2).int(), 16, 0), "a positive int"),
        (Selection(torch.zeros(1, 1, 7, 2).int()), r"\[1 or 2, heads, 8, n\] is needed"),
        (Selection(torch.zeros(1, 1, 8, 2).int(), 16, 3), r"\[1 or 2, heads, 3, n\] is needed"),
        (Selection(torch.zeros(3, 1, 8, 2).int()), r"\[1 or 2, heads, 8, n\] is needed"),
        (Selection(torch.zeros(2, 3, 8, 2).int()), r"1, 2 \(KV heads\) or 4 \(query heads\)"),
        (Selection(torch.full((1, 1, 8, 2), 40).int()), "index 40; the sequence has 40 keys, 0 to 39"),
        (Selection(torch.full((1, 1, 8, 2), 3).int(), 16), "index 3; the sequence has 3 blocks of 16 keys"),
        (Selection(torch.full((1, 1, 8, 2), -2).int()), "index -2"),
        (Selection(torch.zeros(1, 1, 8, 2, device="meta").int()), "indices are on meta"),
        (Selection(torch.zeros(1).int().expand(1, 1, 8, 1 << 29)), "kernels count up to"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(chosen: Selection, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check(chosen)


@pytest.mark.parametrize("checks", [False, True])
def test_indices_on_a_device_are_looked_at_only_on_request(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at them waits for the device."""

    class OnDevice(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

    monkeypatch.setenv("TRITONCP_CHECK", "1" if checks else "0")
    chosen = Selection(torch.full((1, 1, 8, 2), 40).int().as_subclass(OnDevice))
    if not checks:
        check_indices(chosen, 40)
        return
    with pytest.raises(ValueError, match="index 40"):
        check_indices(chosen, 40)


def test_a_selection_that_fits_is_accepted() -> None:
    for shape, *sizes in (((1, 1, 8, 2),), ((2, 4, 8, 0),), ((2, 2, 3, 2), 16, 3)):
        chosen = Selection(torch.zeros(shape).int(), *sizes)
        check(chosen)
