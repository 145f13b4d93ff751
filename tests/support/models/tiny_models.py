"""Tiny models besides those of language_models.py, whose layers have more kinds of blocks: linear attention, state space layers,
short convolutions, hyper-connections, latent attention or gates."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.models.language_models import SIZES, make

# All experts are chosen: a choice might depend on rounding.
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 24}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA = {**HEADS, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LINEAR = {**LATENT, **SHARED, "layer_types": ["linear_attention", "full_attention"]}
SHORT = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
# Those with gated norms.
GATED: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **SHARED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED},
    "olmo_hybrid": DELTA,
    "lara_mini": {**DELTA, **SHARED},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, **LINEAR},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0, **LINEAR},
    "qwen4_exp_text": {
        **HEADS,
        **SHARED,
        "layer_types": ["linear_attention", "indexed_attention"],
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 8},
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, **SHARED, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
        "layers_block_type": ["mamba", "attention"],
    },
    "zamba2": {
        **{"mamba_d_state": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8},
        **{"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
        **{"mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_rms_norm": True},
    },
}
WITH_CONVOLUTIONS: dict[str, dict[str, Any]] = GATED | {
    "lfm2": SHORT,
    "lfm2_moe": {**SHORT, **SHARED},
    "lfm3": {**SHORT, **SHARED},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, **SHARED},
    "zamba": {
        **{"mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 4, "num_hidden_layers": 3},
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
    },
}
ROUTED = {**LATENT, **EXPERTS, "q_lora_rank": 16, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
COMPRESSED = ["heavily_compressed_attention", "compressed_sparse_attention"]
# Limits that many gates of a tiny model are beyond.
DEEPSEEK: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        **{"swiglu_limit": 0.01, "hc_mult": 2, "layer_types": COMPRESSED, "head_dim": 16},
        **{"compress_rates": dict.fromkeys(COMPRESSED, 4), "index_head_dim": 16, "index_n_heads": 2},
        **{"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 8, "num_key_value_heads": 1},
        **{"mlp_layer_types": ["moe", "hash_moe"], **EXPERTS, "n_routed_experts": 2, "n_group": 1, "topk_group": 1},
    },
    "hy_v4": {
        **ROUTED,
        **{"swiglu_limit": 0.01, "mlp_layer_types": ["dense", "sparse"], "index_head_dim": 8, "index_n_heads": 2},
    },
    "deepseek_v3": {**ROUTED, "head_dim": 4, "first_k_dense_replace": 1},
    "deepseek_v32": {
        **ROUTED,
        **{"head_dim": 4, "mlp_layer_types": ["dense", "sparse"], "index_head_dim": 8, "index_n_heads": 2},
    },
}
TINY: dict[str, dict[str, Any]] = {
    **WITH_CONVOLUTIONS,
    **DEEPSEEK,
    "qwen2_moe": SHARED,
    "afmoe": {**SHARED, "num_dense_layers": 1},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "apertus": {"hidden_act": "xielu"},
}


def tiny(name: str, **options: Any) -> nn.Module:
    return make(name, **{k: v for k, v in {**TINY.get(name, {}), **options}.items() if SIZES.get(k) != v})
