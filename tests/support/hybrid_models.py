"""Tiny hybrid models: linear attention, state space layers or short convolutions, beside attention."""

from __future__ import annotations

from typing import Any

import torch
from checks import path_taken
from language_models import SIZES, make, step, tokens
from patched_models import assert_as_exact, assert_same_step, calls_of, trained
from torch import nn

from liger_ops.transformers import SWITCHES, apply_liger_kernel, unpatch

# All experts are chosen: a choice might depend on rounding.
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 24}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA = {**HEADS, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"layer_types": ["linear_attention", "full_attention"], **EXPERTS}
SHORT = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
# Those with gated norms.
GATED: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "olmo_hybrid": DELTA,
    "lara_mini": DELTA,
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, **LATENT},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0, **LATENT},
    "qwen4_exp_text": {
        **HEADS,
        **EXPERTS,
        "layer_types": ["linear_attention", "indexed_attention"],
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 8},
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
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
    "lfm2_moe": {**SHORT, **EXPERTS},
    "lfm3": {**SHORT, **EXPERTS},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, **EXPERTS},
    "zamba": {
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
    },
}
# Options with which apply_liger_kernel patches nothing else.
ALONE = {name: name == "causal_conv1d" for name in SWITCHES}


def hybrid(name: str) -> nn.Module:
    return make(name, **{k: v for k, v in WITH_CONVOLUTIONS[name].items() if SIZES.get(k) != v})


NO_CACHE = dict(use_cache=False)


def without_cache(name: str) -> nn.Module:
    model = hybrid(name)
    model.config.use_cache = False
    return model


def check_convolutions_train_and_generate(name: str, operator: str, calls_with_a_cache: int | None = None) -> None:
    """A model without a cache runs `operator` in every convolution, trains with the same losses and generates the same text.
    calls_with_a_cache: of causal_conv1d."""
    model, ids = without_cache(name), tokens()
    losses, plain = trained(model), step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False, use_cache=True)
    report = apply_liger_kernel(model.train(), **ALONE)
    rows = [row for row in report.rows if row.kind == "conv"]
    assert rows and {(row.replacement, row.reason) for row in rows} == {(operator, "")}
    with path_taken("cpu"):
        assert calls_of(operator, model, ids) == len(rows) and not calls_of("causal_conv1d", model, ids)
    assert_same_step(model, ids, plain)
    assert_as_exact(lambda: trained(model), losses, model)
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False, use_cache=True), text)
    assert not calls_of(operator, model, ids, use_cache=True)
    if calls_with_a_cache is not None:
        assert calls_of("causal_conv1d", model, ids, use_cache=True) == calls_with_a_cache
    assert unpatch(model) and torch.equal(step(model.train(), ids)[0], plain[0])
