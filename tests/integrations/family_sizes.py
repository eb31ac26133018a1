"""Sizes of the small models of tests.integrations.families, and what single families need besides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LENGTH, VOCABULARY = 64, 97

# Sizes of small models, by the name of the attribute of a config.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("embedding_size", "hidden_dim", "mm_hidden_size", "out_hidden_size", "encoder_width"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp", "mlp_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        ("decoder_layers", "num_decoder_layers", "depth", "vision_layers", "num_encoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_attention_heads_per_layer"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "d_kv", "attention_head_dim", "swa_head_dim", "global_head_dim"), 8
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_nextn_predict_layers", "n_shared_experts", "num_hash_layers"), 1
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128
    ),
    **dict.fromkeys(
        ("vocab_size", "text_vocab_size", "char_vocab_size", "vocab_size_per_layer_input"), VOCABULARY
    ),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 20),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("lru_width", "mamba_d_ssm", "mamba_ssm_dim"), 64),
    **dict.fromkeys(("image_size", "patch_size"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "embedding_dim", "projection_dim"), 16),
    **{
        "attention_chunk_size": 16,
        "index_topk": 16,
        "index_n_heads": 2,
        "n_mamba_groups": 1,
        "mamba_n_groups": 1,
    },
    **{"mamba_expand": 2, "first_k_dense_replace": 1, "n_groups": 1, "time_step_rank": 4, "mamba_dt_rank": 4},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1], "laurel_rank": 4},
    **{"num_kv_shared_layers": 0, "initializer_range": 0.02, "use_cache": False, "layerdrop": 0.0},
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "sep_token_id": 2,
    },
    **{"pretraining_tp": 1, "use_mambapy": False, "output_router_logits": False, "use_kernels": False},
}
# Other sizes, tried in this order where a model does not run with those above.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 16},
    {"num_experts_per_tok": 1},
    {"head_dim": None, "num_attention_heads": 2},
    {"hidden_size": 256, "head_dim": 64},
    {"hidden_size": 512, "head_dim": 128, "vision_config": {"hidden_size": 32}},
    {"moe_intermediate_size": None, "patch_size": None, "image_size": None, "sliding_window": None},
)
# What single families need besides: values of a config, by name; those of a config within it are a dict.
VQ: dict[str, Any] = {
    **{"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32},
    **{"num_embeddings": VOCABULARY, "embed_dim": 8, "projection_dim": 32, "image_token_embed_dim": 32},
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"full_attention": ROPE, "sliding_attention": ROPE}
EXPERTS = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DOTS: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "shared_experts_intermediate_size": 16},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8},
    **{"swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
}
INDEXER: dict[str, Any] = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
    **{"indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8, "ngram_vocab_size_base": VOCABULARY},
}
HYBRID: dict[str, Any] = {
    **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "num_key_value_heads": 4,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": VOCABULARY,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 1, "IMGIMGAZ": 2},  # ids that are no labels
        "vq_config": {**VQ, "embed_dim": 32},
    },
    "cohere_compass": {"text_config": {"rope_parameters": ROPES}},
    "cohere_compass_text": {"rope_parameters": ROPES},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48},
    },
    "deepseek_ocr2": {"text_config": {**EXPERTS, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": {**EXPERTS, "num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": DOTS,
    "dots3_note_text": DOTS,
    "ernie4_5_vl_moe": {
        "text_config": {"head_dim": 16, "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}
    },
    "esm": {"vocab_size": VOCABULARY},
    "florence2": {
        "vision_config": {
            **{"embed_dim": [8, 8, 16, 32], "depths": [1, 1, 1, 1], "projection_dim": 32},
            **{"num_heads": [1, 1, 2, 2], "num_groups": [1, 1, 2, 2]},
        }
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 1, 1]}}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "janus": {"vq_config": VQ, "vision_config": {"projection_dim": 32}},
    "kosmos-2": {"latent_query_num": 4},
    "kyutai_speech_to_text": {
        **{"audio_pad_token_id": 96, "codebook_vocab_size": VOCABULARY, "num_codebooks": 2},
        "codec_config": {"upsample_groups": 32, "num_filters": 8, "codebook_dim": 32},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": VOCABULARY, "entity_emb_size": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 32}},
    "muse_spark": {
        "audio_config": {
            "num_hidden_layers": 4,
            "hidden_sizes": [8, 8, 16, 32],
            "out_hidden_size": 32,
        }
    },
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "word_timestamp_config": {"blank_token_id": VOCABULARY - 1},
    },
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        **{"projector_hidden_size": 32, "vision_hidden_size": 32},
    },
    "perceiver": {
        **{"max_position_embeddings": LENGTH, "num_latents": 16, "d_latents": 32},
        **{"num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        **{"qk_channels": 32, "v_channels": 32},
    },
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "reformer": {
        **{"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8], "hash_seed": 1},
        **{"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16},
        **{"feed_forward_size": 48, "num_buckets": 4},
    },
    "xlstm": {"embedding_dim": 32, "chunk_size": 16, "mode": "train"},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {**HYBRID, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": HYBRID,
}
# Classes to build in place of those that transformers lists first, which take no tokens.
CLASSES = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


# Inputs of two rows besides tokens and labels, or in place of them.
IMAGE = {"pixel_values": _normal(2, 3, 16, 16)}
CODES = {"input_ids": _tokens(8, LENGTH), "labels": _tokens(2, LENGTH, 4)}
INPUTS: dict[str, dict[str, Any]] = {
    "blip": IMAGE,
    "git": IMAGE,
    "idefics": {"pixel_values": _normal(2, 1, 3, 16, 16), "image_attention_mask": torch.ones(2, LENGTH, 1)},
    "kyutai_speech_to_text": {"input_ids": _tokens(2, LENGTH, 3)},
    "kosmos-2": {**IMAGE, "image_embeds_position_mask": (torch.arange(LENGTH) < 4).expand(2, -1)},
    "molmo2": {"mm_token_type_ids": torch.zeros(2, LENGTH, dtype=torch.int64)},
    "musicgen": CODES,
    "musicgen_melody": CODES,
    "udop": {"bbox": torch.zeros(2, LENGTH, 4)},
    "voxtral_realtime": {"input_features": _normal(2, 128, 8 * LENGTH)},
}
