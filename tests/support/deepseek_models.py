"""Tiny DeepSeek models and their relatives."""

from language_models import SIZES, make

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
# All experts are chosen: a choice might depend on rounding.
EXPERTS = {"num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"n_group": 1, "topk_group": 1}
COMPRESSED = ["heavily_compressed_attention", "compressed_sparse_attention"]
# Limits that many gates of a tiny model are beyond.
MODELS = {
    "deepseek_v4": {
        **{"swiglu_limit": 0.01, "hc_mult": 2, "layer_types": COMPRESSED, "head_dim": 16},
        **{"compress_rates": dict.fromkeys(COMPRESSED, 4), "index_head_dim": 16, "index_n_heads": 2},
        **{"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 8, "num_key_value_heads": 1},
        **{"mlp_layer_types": ["moe", "hash_moe"], **EXPERTS},
    },
    "hy_v4": {
        **{"swiglu_limit": 0.01, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
        **{"index_head_dim": 8, "index_n_heads": 2, **LATENT, **EXPERTS},
    },
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 1, **LATENT, **EXPERTS},
    "deepseek_v32": {
        **{"num_key_value_heads": 4, "head_dim": 4, "mlp_layer_types": ["dense", "sparse"]},
        **{"index_head_dim": 8, "index_n_heads": 2, **LATENT, **EXPERTS},
    },
}


def model_of(name, **options):
    return make(name, **{k: v for k, v in {**MODELS[name], **options}.items() if SIZES.get(k) != v})
