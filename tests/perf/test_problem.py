"""Masks of problems by name: they never change."""

import pytest
import torch

from tritoncp.perf.problem import MASKS, Problem, corpus_lengths

CPU, N = torch.device("cpu"), 6144
SUMS = dict.fromkeys(["causal", "softcap", "alibi", "sinks"], 5519403008) | {
    "full": 16568997888, "document": 742418999, "window": 2325616493, "prefix": 5692305628,
    "window128-sinks": 337879789, "window4k": 5315180836, "corpus": 949406067, "corpus-window": 918827973,
    "corpus-window4k": 949406067, "shared-question": 1489408303, "two-sided-window": 551215114,
    "third-window": 3893712164, "neighbours": 8085064, "three-documents": 11724985,
    "few-documents": 2951321679, "dilated": 5522997248,
}  # fmt: skip


@pytest.mark.long
def test_masks_never_change() -> None:
    """They are compared by the sum of the positions of the keys that every seventh query sees."""
    sums = {}
    for name in MASKS:
        problem = Problem(name, 1024 if name == "three-documents" else N)
        closed = problem.closed_form(CPU)
        q, kv = torch.arange(0, problem.seq, 7)[:, None], torch.arange(problem.seq)
        visible = q + kv >= 0 if closed is None else closed(None, None, q, kv)
        sums[name] = int((visible * kv).sum())
    assert sums == SUMS


def test_no_document_of_a_corpus_is_empty() -> None:
    assert corpus_lengths(4) == [1, 1, 1, 1]


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
