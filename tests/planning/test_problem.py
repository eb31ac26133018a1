"""Masks of problems by name: they never change, and both forms of a mask agree."""

import torch

from tritoncp.planning.problem import MASKS, Problem

CPU, N = torch.device("cpu"), 6144
PAIRS = dict.fromkeys(["causal", "softcap", "alibi", "sinks"], 2695899) | {
    "full": 5394432, "document": 363372, "window": 823808, "prefix": 2864969, "window128-sinks": 111168,
    "window4k": 2396453, "corpus": 371137, "corpus-window": 352522, "corpus-window4k": 371137,
    "shared-question": 1383580, "two-sided-window": 182294, "third-window": 1501038, "neighbours": 2633,
    "three-documents": 25832, "few-documents": 993812, "dilated": 1798144,
}  # fmt: skip


def test_masks_never_change_and_both_forms_agree() -> None:
    """By the visible pairs of every seventh query."""
    pairs = {}
    for name in MASKS:
        problem = Problem(name, 1024 if name == "three-documents" else N)
        closed, plain = problem.closed_form(), problem.plain_mod(CPU)
        q, kv = torch.arange(0, problem.seq, 7)[:, None], torch.arange(problem.seq)
        seen = q + kv >= 0 if closed is None else closed(None, None, q, kv)
        assert plain is None or torch.equal(plain(None, None, q, kv), seen), name
        pairs[name] = int(seen.sum())
    assert pairs == PAIRS


def test_a_problem_has_its_rows_blocks_and_sinks() -> None:
    problem = Problem("sinks", 300, heads=5, queries=7)
    assert problem.sinks(CPU).tolist() == [-2, -1, 0, 1, 2] and Problem("causal", 300).sinks(CPU) is None
    masks = problem.block_mask(), Problem("full", 300, queries=7).block_mask(block=64)
    assert [(mask.shape, mask.q_block, mask.kv_block) for mask in masks] == [
        ((1, 1, 7, 300), 128, 128), ((1, 1, 7, 300), 64, 64)
    ]  # fmt: skip
    assert [Problem("causal", 300, score=name).score_mod(CPU) is None for name in ("", "alibi")] == [
        True,
        False,
    ]
