"""The cases of torch's flex attention tests (test/inductor/test_flex_attention.py) as a table.

``Case.test`` is the test of torch that a row stands for, without its prefix ``test_``. Sizes are small; what
differs between cases is what differs between torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.compat.dense import BF16, F16, F32, F64
from tests.compat.torch_mods import BUILTIN, LEARNED, Dims


class Case(NamedTuple):
    """One call. ``block``, ``lists``: BLOCK_SIZE, and B and H, of the block mask; no mask: none is passed."""

    test: str
    score: str | None = None
    mask: str | None = None
    dims: Dims = Dims()
    dtype: torch.dtype = F32
    block: int | tuple[int, int] = 32
    lists: tuple[int | None, int | None] = (1, 1)
    learned: bool = False  # captured tensors have the dtype of q, and get gradients
    passes: str = "training"  # or "inference"

    @property
    def name(self) -> str:
        """Everything that tells this case from the others of its test."""
        sizes = "x".join(str(n) for n in self.dims if n is not None)
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.test}-{self.score or 'no score'}-{self.mask or 'no mask'}-{sizes}-{kind}-{self.block}"


LOW = [F16, BF16]
DTYPES = [F32, *LOW]
TWO = Dims(batch=2)
GROUPS = [(4, 2), (4, 1)]
BATCHES = [3, 4, 5]


def _scores_of_torch() -> list[Case]:
    """The score_mods that most tests of torch are repeated over."""
    return [
        *(Case("builtin_score_mods", s, dims=TWO, dtype=t) for s in BUILTIN for t in DTYPES),
        *(
            Case("builtin_score_mods_seqlen_lt_default_sparse_block_size", s, dims=Dims(q=48))
            for s in BUILTIN
        ),
        *(
            Case("builtin_score_mods_seqlen_lt_custom_sparse_block_size", s, "causal", Dims(q=48), block=256)
            for s in BUILTIN
        ),
        *(Case("builtin_score_mods_different_seqlen", s, dims=Dims(q=32, kv=64), dtype=F16) for s in BUILTIN),
        *(
            Case("builtin_score_mods_different_block_size", s, "noop", block=b)
            for s in BUILTIN
            for b in (16, 32, (16, 32), (32, 16))
        ),
        *(
            Case(
                "kv_batch_broadcast",
                s,
                "noop",
                Dims(rows, hq, kv_heads=hkv, kv_batch=1, q=32),
                lists=(rows, 1),
            )
            for s in BUILTIN
            for rows, (hq, hkv) in zip(BATCHES, [*GROUPS, GROUPS[0]])
        ),
        *(
            Case(
                "kv_batch_broadcast_causal_mask",
                None,
                "causal",
                Dims(rows, hq, kv_heads=hkv, kv_batch=1, q=32),
                lists=(rows, 1),
            )
            for rows in BATCHES
            for hq, hkv in GROUPS
        ),
        *(Case("GQA", s, dims=Dims(heads=8, kv_heads=2, q=16, kv=64)) for s in BUILTIN),
        *(
            Case("non_equal_head_dims", s, dims=Dims(dim=d, v_dim=e), dtype=t)
            for s in BUILTIN
            for d, e in ((32, 16), (16, 32))
            for t in (F32, F16)
        ),
        *(
            Case("non_pow_2_headdim", "relative", dims=Dims(dim=d, v_dim=d), dtype=F16)
            for d in (17, 24, 94, 121)
        ),
        *(Case("return_max", s, dims=Dims(q=53), dtype=F16) for s in BUILTIN),
    ]


def _captured_tensors() -> list[Case]:
    """Score_mods that read tensors."""
    low_and_exact = {
        "doc_mask_sparse": "document causal",
        "index_multiple": "index twice",
        "index_weird1": "index constant, pair, one",
        "index_weird2": "index by a captured scalar",
        "function_composition": "composed",
        "captured_buffers_all_dims": "token, batch and head bias",
        "skip_odd_keys": "even keys",
        "seq_masking": "halves by bool",
        "load_from_bias_seq_only": "bias[q, kv]",
        "load_from_bias_seq_batch": "bias[b, q, kv]",
        "load_from_bias_head_seq_batch": "bias[b, h, q, kv]",
        "load_from_view_buffer": "bias[b, h, q, kv // 8]",
        "load_rel_bias": "bias[q - kv]",
        "dependent_causal_bidirectional": "bidirectional start",
        "njt_causal": "nested causal",
    }
    once = {
        "natten_2d": "grid neighbours",
        "subgraph_respect_decompostion": "floor division by keys",
        "silu_on_score": "silu",
        "padded_dense_causal": "scores below a length",
        "captured_scale": "int scalar",
        "modular_indexing": "bias of a view",
        "custom_score_mod_layout_freeze": "gated table",
        "upcast_appropriately": "log of an element",
    }
    return [
        *(Case(test, s, dims=TWO, dtype=t) for test, s in low_and_exact.items() for t in (F16, F32)),
        *(Case(test, s, dims=TWO) for test, s in once.items()),
        Case("natten_2d", "grid neighbours, true division", dims=TWO),
        Case("recompile_changed_score_mod", "branch taken"),
        Case("recompile_changed_score_mod", "branch not taken"),
        Case("new_empty_mask_mod", "bool bias", "causal", TWO, lists=(2, None)),
        Case("flex_attention_poisoned_rel_logits", "rows of NaN beyond the batch", "causal", Dims(q=65)),
        Case("flex_attention_poison_mod_fwd", "reciprocal", "causal", Dims(q=49), F64),
        Case("flex_attention_poison_mod_bwd", "log where positive", "causal", Dims(q=49), F64),
        *(
            Case("captured_score_mod_aot_eager_gradcheck", "head factor", dims=Dims(2, 2, 11, 4), dtype=t)
            for t in (F32, F64)
        ),
        *(
            Case("aot_eager_gradcheck", s, dims=Dims(2, 2, 11, 4), dtype=F64)
            for s in ("identity", "causal", "times two", "squared")
        ),
        *(
            Case("non_divisible_with_captured_buffer", "query factor", dims=Dims(q=67), dtype=t)
            for t in DTYPES
        ),
        *(
            Case(
                "causal_block_non_divisible_with_captured_buffer",
                "query and key bias",
                "causal",
                Dims(q=61),
                t,
            )
            for t in DTYPES
        ),
    ]


def _masks() -> list[Case]:
    """Block masks."""
    mask = {
        "causal_block": Case("", None, "causal"),
        "causal_block_non_divisible": Case("", None, "causal", Dims(2, q=63), lists=(2, 1)),
        "block_mask_non_divisible": Case("", None, "blocks of 16", Dims(q=71), lists=(None, None)),
        "GQA_causal_mask": Case("", None, "causal", Dims(2, 4, kv_heads=1), lists=(2, 1)),
        "mask_mod_combiners": Case("", None, "causal and window"),
        "document_masking_edge_case": Case("", None, "two documents", TWO, lists=(2, 1)),
        "doc_mask_clamped_repro": Case("", None, "clamped documents", Dims(q=67), lists=(None, None)),
        "fully_masked_out_rows": Case("", "identity", "first half of the queries", TWO, lists=(2, 1)),
        "fully_masked_out_rows_0_check": Case("", None, "first half of the queries", TWO, lists=(2, 1)),
        "_test_block_mask_reuse_with_weird_mask": Case("", None, "start and end", lists=(None, None)),
        "dynamic_shapes_bug_dynamic_batch": Case("", None, "lengths", Dims(3, q=12), lists=(3, None)),
        "free_symbol_dynamic": Case("", None, "hidden rows", TWO, lists=(2, None)),
        "block_mask_attributes": Case("", None, "offset by batch", Dims(4, 1), lists=(4, 1)),
        "from_kv_blocks": Case("", None, "random bits", TWO, lists=(2, 2)),
    }
    return [
        *(row._replace(test=test, dtype=t) for test, row in mask.items() for t in (F32, F16)),
        *(
            Case("lse_masked_output", None, m, Dims(2, q=49))
            for m in ("causal and window", "causal beyond a window")
        ),
        *(Case("fw_bw_graph_correctness", "squared", "causal", Dims(2, 2, 64, 4), t) for t in (F32, F64)),
        *(
            Case("comparison_vs_sdpa", s, m, TWO, F16)
            for s, m in (("causal", None), ("causal", "causal"), (None, "causal"))
        ),
        *(Case("mask_mod_combiners", None, m) for m in ("nothing", "noop")),
        *(Case("free_symbol_dynamic", None, m, Dims(3, q=32), lists=(3, None)) for m in ("even batch rows",)),
        *(Case("block_size_changes", None, "causal", block=b) for b in (16, 32, 64, 128, (16, 32), (32, 16))),
        Case("invalid_block_size", None, "noop", block=48),
        *(Case("getitem", None, "head of its own", Dims(1, 4), lists=(1, 4), block=b) for b in (16, 64)),
    ]


def _results_and_shapes() -> list[Case]:
    """Log-sum-exp, and sizes at the limits."""
    return [
        *(
            Case("logsumexp_correctness", s, dims=TWO, dtype=t)
            for s in ("identity", "causal")
            for t in DTYPES
        ),
        *(
            Case(test, dims=dims, dtype=t)
            for test, dims, t in (
                ("differentiable_logsumexp_gradcheck", Dims(2, 2, 11, 4), F64),
                ("differentiable_logsumexp_compiled", Dims(2, 2, 32), F32),
                ("logsumexp_only_return", TWO, F32),
                ("force_write_lse", TWO, F32),
            )
        ),
        *(Case("small_q_kv_len", dims=Dims(heads=1, q=n)) for n in (1, 2, 17)),
        Case("num_warps_8_error", "identity", dims=Dims(q=32, dim=128, v_dim=128), dtype=F16),
        Case("validate_small_embedding_size_error_message", dims=Dims(dim=8)),
        *(
            Case("eager_tracing_correctness", dims=Dims(1, 4, kv_heads=2, v_dim=32), dtype=t)
            for t in (F16, F32)
        ),
        Case("validate_cpu_dtype_error_message", dims=TWO, dtype=F16),
        Case("cpu_error_message_return_lse", dims=TWO),
        Case("float32_matmul_precision", "times two", dims=TWO),
        Case("eager_backward_strides", dims=Dims(1, 4)),
        Case("large_batch_heads_grid_dimension", dims=Dims(33, 3, 4), passes="inference"),
        *(Case("dynamic_divisibility_guards", "causal", "noop", Dims(q=n)) for n in (32, 31, 47, 48)),
    ]


def _learned_biases() -> list[Case]:
    """Captured tensors with gradients, by length and dtype."""
    tests = {
        "relative_1d_bias": "bias[|q - kv|]",
        "absolute_2d_bias": "bias[q, kv]",
        "head_specific_bias": "bias[h, q, kv]",
        "batch_head_bias": "bias[b, h, q, kv]",
        "multiplicative_bias": "query factor",
        "local_window_bias": "bias of a clamped distance",
        "global_tokens_bias": "bias[kv]",
        "weird_bias": "bias[b, h, captured, q]",
        "indirect_bias": "bias[permutation[q]]",
        "symmetric_bias": "one bias read twice",
        "flipped_indexed_bias": "bias[kv, q]",
        "head_specific_gate": "head gate",
        "distinct_biases": "query and key bias",
    }
    sdpa = ["bias[q + kv]", "bias[q, kv]", "bias[q][kv]", "bias[kv, q]", "bias[h, kv, q]"]
    grid = [(37, F32), (64, F32), (69, F32), (37, F16), (64, BF16)]
    return [
        *(
            Case(test, s, dims=Dims(2, q=n), dtype=t, learned=True)
            for test, s in tests.items()
            for n, t in grid
        ),
        *(
            Case("comparison_vs_sdpa_with_learnable_bias", s, dtype=t, learned=True)
            for s in sdpa
            for t in (F16, F32)
        ),
        *(Case("head_bias_req_grad", "bias[h]", dims=Dims(1, 4), dtype=t, learned=True) for t in (F16, F32)),
        Case("learnable_bias_global_compiled", "bias[b, h, q, kv]", dims=Dims(1, 1), learned=True),
    ]


CASES = [
    *_scores_of_torch(),
    *_captured_tensors(),
    *_masks(),
    *_results_and_shapes(),
    *_learned_biases(),
]


def first_of_each(cases: list[Case]) -> list[Case]:
    """The first case of each score_mod, mask_mod, dtype, block size and head layout."""
    seen: set[object] = set()
    first = []
    for case in cases:
        heads = (
            case.dims.heads // (case.dims.kv_heads or case.dims.heads),
            case.dims.v_dim,
            case.dims.kv_batch,
        )
        features = {
            ("score", case.score, case.learned),
            ("mask", case.mask),
            ("dtype", case.dtype),
            ("block", case.block),
            ("heads", heads),
        }
        if not features <= seen:
            first.append(case)
        seen |= features
    return first


assert set(LEARNED) <= {case.score for case in CASES}
