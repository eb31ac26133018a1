"""The names of torch's flex attention tests, and where each of their cases is tested here.

``python -m tests.compat.torch_list`` counts them. Cases of the table in torch_cases.py carry the name.
"""

from __future__ import annotations

from collections import Counter

from tests.compat.torch_cases import CASES

CALLS, COMPILED = "test_torch_calls", "test_torch_compiled"
REFUSALS, MASKS = "test_torch_refusals", "test_torch_block_masks"

# test of torch -> tests here beside the rows of the table: module and function
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "captured_reduction": ("test_drop_in.test_scores",),
    "reduction_unrolled": ("test_drop_in.test_scores",),
    "cant_lower_error_message": ("test_drop_in.test_a_long_reduction_names_its_remedy",),
    "compiling_create_block_mask": ("test_drop_in.test_compiling_create_block_mask",),
    "compiling_create_block_mask_no_recompile": ("test_drop_in.test_compiling_create_block_mask",),
    "builtin_score_mods_dynamic": (f"{COMPILED}.test_one_graph_for_all_lengths",),
    "builtin_score_mods_automatic_dynamic": (f"{COMPILED}.test_one_graph_for_all_lengths",),
    "builtin_score_mods": (f"{COMPILED}.test_compiled_whole", f"{CALLS}.test_paged_builtin_score_mods"),
    "GQA": (f"{REFUSALS}.test_what_torch_refuses_is_refused",),
    "small_block_mask": (f"{MASKS}.test_small_block_mask",),
    "strided_inputs": (f"{CALLS}.test_strided_inputs",),
    "strided_backwards": (f"{CALLS}.test_gradients_reach_tensors_through_slices",),
    "flex_attention_stride_ordering": (f"{CALLS}.test_results_lie_in_memory_as_their_tensors_do",),
    "flex_attention_backward_stride_ordering": (f"{CALLS}.test_results_lie_in_memory_as_their_tensors_do",),
    "non_contiguous_last_dim": (f"{CALLS}.test_columns_before_rows",),
    "return_max": (f"{CALLS}.test_return_aux",),
    "return_aux": (f"{CALLS}.test_return_aux",),
    "return_aux_deprecation_warnings": (f"{REFUSALS}.test_what_torch_refuses_is_refused",),
    "lse_masked_output": (f"{CALLS}.test_log_sums_of_two_masks_merge_into_the_whole",),
    "multiple_score_mod_calls": (
        f"{CALLS}.test_multiple_score_mod_calls",
        f"{COMPILED}.test_multiple_calls_in_one_graph",
    ),
    "multiple_score_mod_calls2": (
        f"{CALLS}.test_multiple_score_mod_calls",
        f"{COMPILED}.test_multiple_calls_in_one_graph",
    ),
    "multiple_score_mod_calls_paged_attention": (f"{CALLS}.test_paged_builtin_score_mods",),
    "multiple_score_mod_calls2_paged_attention": (f"{CALLS}.test_paged_builtin_score_mods",),
    "causal_block_paged_attention": (f"{CALLS}.test_paged_builtin_score_mods",),
    "paged_builtin_score_mods": (f"{CALLS}.test_paged_builtin_score_mods",),
    "convert_logical_block_mask": (f"{CALLS}.test_paged_builtin_score_mods",),
    "convert_mask_mod": (f"{CALLS}.test_paged_builtin_score_mods",),
    "multiple_mask_calls": (f"{COMPILED}.test_multiple_mask_calls",),
    "inputs_are_realized": (f"{COMPILED}.test_tensors_made_in_the_graph_are_captured",),
    "custom_score_mod_layout_freeze": (f"{COMPILED}.test_tensors_made_in_the_graph_are_captured",),
    "symbol_closure_in_score_mod": (f"{COMPILED}.test_a_size_in_the_closure_of_a_score_mod",),
    "aot_eager_gradcheck": (f"{COMPILED}.test_gradcheck",),
    "captured_score_mod_aot_eager_gradcheck": (f"{COMPILED}.test_gradcheck",),
    "differentiable_logsumexp_gradcheck": (f"{COMPILED}.test_gradcheck",),
    "learnable_bias_global_compiled": (f"{COMPILED}.test_learned_bias_of_a_compiled_call",),
    "relative_1d_bias_only_grad": (f"{CALLS}.test_only_the_bias_needs_gradients",),
    "selective_ac": (f"{COMPILED}.test_selective_ac",),
    "tensor_subclass_dispatch_order": (f"{CALLS}.test_tensor_subclass_dispatch_order",),
    "broadcasted_head_block_mask": (f"{CALLS}.test_one_query_against_a_cache_at_an_offset",),
    "small_q_kv_len": (f"{CALLS}.test_one_key_and_no_key",),
    "mixed_dtypes_fails": (f"{REFUSALS}.test_what_torch_refuses_is_refused",),
    "mixed_device_error_message": (f"{REFUSALS}.test_what_torch_refuses_is_refused",),
    "block_mask_vs_sequence_lengths": (
        f"{REFUSALS}.test_what_torch_refuses_is_refused",
        f"{REFUSALS}.test_lengths_are_compared_in_a_graph_too",
    ),
    "kernel_options_argument_is_respected": (f"{REFUSALS}.test_other_kernel_options_of_torch_are_taken",),
    "dynamic_shapes_with_custom_kernel_options": (
        f"{REFUSALS}.test_other_kernel_options_of_torch_are_taken",
    ),
    "tma_with_customer_kernel_options": (f"{REFUSALS}.test_other_kernel_options_of_torch_are_taken",),
    "triton_template_warp_specialization": (
        f"{REFUSALS}.test_kernel_options_of_torch_that_name_its_template_are_refused",
    ),
    "validate_small_embedding_size_error_message": (f"{REFUSALS}.test_head_dims_below_16_are_taken",),
    "zero_length_sequence_error": (f"{REFUSALS}.test_an_empty_sequence_gives_an_empty_result",),
    "invalid_block_size": (f"{REFUSALS}.test_any_block_size_is_taken",),
    "no_q_info": (f"{REFUSALS}.test_the_backward_pass_needs_no_lists_by_key",),
    "backward_error_with_none_q_indices": (f"{REFUSALS}.test_the_backward_pass_needs_no_lists_by_key",),
    "forward_pass_with_none_q_indices": (f"{REFUSALS}.test_the_backward_pass_needs_no_lists_by_key",),
    "autograd_function_in_score_mod": (f"{REFUSALS}.test_an_autograd_function_is_part_of_a_score_mod",),
    "cpu_error_message_return_lse": (f"{REFUSALS}.test_lse_of_a_compiled_call_on_the_cpu",),
    "validate_cpu_dtype_error_message": (f"{REFUSALS}.test_lse_of_a_compiled_call_on_the_cpu",),
    "block_mask_attributes": (f"{MASKS}.test_block_mask_attributes", f"{MASKS}.test_blocks_of_every_mask"),
    "block_size_changes": (f"{MASKS}.test_block_size_changes",),
    "block_size": (f"{MASKS}.test_block_size_changes",),
    "getitem": (f"{MASKS}.test_getitem", f"{REFUSALS}.test_what_torch_refuses_is_refused"),
    "block_mask_device_change": (f"{MASKS}.test_block_mask_device_change",),
    "block_mask_viz": (f"{MASKS}.test_the_picture_shows_the_blocks",),
    "from_kv_blocks": (f"{MASKS}.test_from_kv_blocks",),
    "from_kv_blocks_without_q_computation": (f"{MASKS}.test_from_kv_blocks",),
    "mask_mod_combiners": (f"{MASKS}.test_mask_mod_combiners",),
    "custom_block_mask_generator": (f"{MASKS}.test_custom_block_mask_generator",),
    "inspect_bug": (f"{MASKS}.test_a_partial_with_a_captured_scalar",),
    "_test_block_mask_reuse_with_weird_mask": (f"{MASKS}.test_a_cropped_mask_is_taken",),
    "make_block_mask": (f"{MASKS}.test_blocks_of_every_mask",),
}

# test of torch -> why there is nothing to test here
NOT_HERE: dict[str, str] = {
    "epilogue_fused": "counts the bytes of inductor's fused kernel",
    "max_autotune": "inductor's choice of a template; tests/tuning tests tritoncp's",
    "max_autotune_with_captured": "inductor's choice of a template",
    "dynamic_shapes_with_max_autotune": "inductor's choice of a template",
    "flex_attention_with_dynamic_max_autotune": "inductor's choice of a template",
    "flex_attention_with_dynamic_max_autotune_graph_partition": "inductor's choice of a template",
    "debug_flag_disables_internal_compilation": "a flag of torch's eager call",
    "init_mismatched_full_kv": "the constructor of torch's BlockMask",
    "init_mismatched_full_q": "the constructor of torch's BlockMask",
    "block_mask_operations_with_none_q_indices": "methods of torch's BlockMask",
    "create_is_cuda_graphable": "masks are made on the host; tests/gpu captures calls in graphs",
    "device_cuda_1": "needs a second GPU",
    "qkv_and_block_mask_on_the_same_device": "needs a second GPU; a mask serves every device",
    "captured_wrong_device_error_message": "needs a GPU",
    "page_allocation": "the page table itself, which is torch's",
    "allocate": "the page table itself, which is torch's",
    "update": "the page table itself, which is torch's",
}


def count() -> str:
    """A line for each test of torch, and the sum."""
    rows = Counter(case.test for case in CASES)
    names = sorted({*rows, *ELSEWHERE, *NOT_HERE})
    lines = []
    for name in names:
        where = [f"{rows[name]} rows"] * bool(rows[name]) + list(ELSEWHERE.get(name, ()))
        where += [f"not here: {NOT_HERE[name]}"] if name in NOT_HERE else []
        lines.append(f"{name}: {'; '.join(where)}")
    tested = len({*rows, *ELSEWHERE})
    lines.append(
        f"{len(names)} tests of torch: {tested} tested here by {len(CASES)} rows and the tests above, "
        f"{len(NOT_HERE)} not here"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(count())
