"""The names in each module of the package."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from . import (
    bases,
    chunked_distillation,
    chunked_loss,
    chunked_policy,
    functional,
    functions,
    helpers,
    layers,
    megatron,
    missing,
    mlps,
    ops,
    patching,
    signatures,
    utils,
)
from .formulas import activations, attention, hyper_connections, norms
from .names import PACKAGE

# Module below `liger_kernel.transformers`: names.
TRANSFORMERS = {
    "auto_model": "AutoLigerKernelForCausalLM",
    "cross_entropy": "LigerCrossEntropyLoss",
    "dyt": "LigerDyT",
    "fused_add_rms_norm": "LigerFusedAddRMSNorm",
    "fused_ce_tvd": "LigerFusedCETVDLoss",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
    "fused_linear_jsd": "LigerFusedLinearJSD",
    "fused_linear_kl_div": "LigerFusedLinearKLDivLoss",
    "fused_neighborhood_attention": (
        "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionConfig LigerFusedNeighborhoodAttentionLayer"
    ),
    "geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
    "group_norm": "LigerGroupNorm",
    "jsd": "LigerJSD",
    "kl_div": "LigerKLDIVLoss",
    "layer_norm": "LigerLayerNorm",
    "llama4_rope": ("apply_liger_llama4_rope_full liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb"),
    "mhc": "LigerMHC",
    "mlp": "LigerFalconH1MLP LigerMLP",
    "modulated_rms_norm": "LigerModulatedRMSNorm",
    "monkey_patch": " ".join(
        ["MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance", *patching.APPLIERS]
    ),
    "multi_token_attention": "LigerMultiTokenAttention",
    "poly_norm": "LigerPolyNorm",
    "qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
    "relu_squared": "LigerReLUSquared",
    "rms_norm": " ".join(name for name in vars(layers) if name.startswith("LigerRMSNorm")),
    "rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    "softmax": "LigerSoftmax",
    "sparsemax": "LigerSparsemax",
    "swiglu": (
        "LigerBlockSparseTop2MLP LigerExperts LigerFalconH1SwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerPhi3SwiGLUMLP "
        "LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer"
    ),
    "tiled_mlp": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
    "tvd": "LigerTVDLoss",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCrossEntropy",
}
# Module below `liger_kernel.ops`: names.
OPS = {
    "attn_res": "LigerAttnResFunction",
    "cross_entropy": "LigerCrossEntropyFunction",
    "dyt": "LigerDyTFunction",
    "experimental.embedding": "LigerEmbeddingFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_ce_tvd": "LigerFusedCETVDFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
    "fused_linear_scaled_cross_entropy": (
        "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction"
    ),
    "fused_moe": "LigerFusedMoEFunction",
    "fused_neighborhood_attention": "LigerFusedNeighborhoodAttentionFunction",
    "geglu": "LigerGELUMulFunction",
    "group_norm": "LigerGroupNormFunction",
    "grpo_loss": "GrpoLossFunction",
    "jsd": "LigerJSDFunction",
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "mhc": "LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction",
    "mlp": "LigerMLPFunction",
    "modulated_rms_norm": "LigerModulatedRMSNormFunction",
    "multi_token_attention": "LigerMultiTokenAttentionFunction",
    "poly_norm": "LigerPolyNormFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "softmax": "LigerSoftmaxFunction",
    "sparsemax": "LigerSparsemaxFunction",
    "swiglu": "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction",
    "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    "tvd": "LigerTVDLossFunction",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction",
}
# Module below `liger_kernel.ops`: helpers.
HELPERS = {
    "experimental.mm_int8int2": "matmul pack_weights unpack_weights",
    "fused_moe": "compute_routing_metadata",
    "grpo_loss": "fused_selective_log_softmax",
    "utils": "calculate_settings compare_version device_context ensure_contiguous get_amp_custom_fwd_bwd is_hip",
    "vocab_parallel_cross_entropy": "validate_formula_and_mode",
}
MEGATRON = {
    "cross_entropy": ["LigerMegatronCrossEntropy"],
    "rms_norm": ["LigerMegatronRMSNorm"],
    "swiglu": ["LigerMegatronSwiGLU"],
}
# Functions whose names begin with `liger_`, beside those in `functions`.
FORMULAS = [name for module in (activations, attention, hyper_connections, norms) for name in vars(module)
            if name.startswith("liger_")]  # fmt: skip


def raw_names(stem: str) -> list[str]:
    return missing.RAW.get(stem, "").split()


def of_ops(stem: str) -> list[str]:
    return [*OPS.get(stem, "").split(), *HELPERS.get(stem, "").split(), *raw_names(stem)]


# Those of the raw names that `liger_kernel.ops` has too.
NOT_EXPORTED = ("fused_neighborhood_attention", "llama4_rope", "qwen2vl_mrope")
EXPORTED = [name for stem in OPS if stem not in NOT_EXPORTED for name in (f"{stem}_backward", f"{stem}_forward")
            if name in raw_names(stem)]  # fmt: skip
# Path below the package: names.
MODULES: dict[str, list[str]] = {
    "chunked_loss": [name for names in chunked_loss.CHUNKED_LOSS.values() for name in names if name.endswith("Loss")],
    "functional": list(signatures.FUNCTIONAL),
    "env_report": ["print_env_report"],
    "megatron": [name for names in MEGATRON.values() for name in names],
    "utils": (
        "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device infer_device_arch is_npu_available "
        "is_peft_available transformers_version_dispatch"
    ).split(),
    "ops": [*" ".join(OPS.values()).split(), *EXPORTED],
    "transformers": [
        "is_transformers_available",
        *(name for name in " ".join(TRANSFORMERS.values()).split() if not name.startswith("MODEL_TYPE")),
    ],
    "transformers.experimental": ["LigerEmbedding"],
    "transformers.experimental.embedding": ["LigerEmbedding"],
    "transformers.functional": functions.FUNCTIONAL + FORMULAS,
    "transformers.grpo_loss": ["fused_selective_log_softmax", "triton_grpo_loss"],
    "transformers.model.loss_utils": functions.LOSS_UTILS,
    "transformers.trainer_integration": ["_apply_liger_kernel", "_apply_liger_kernel_to_instance"],
    **{f"transformers.{stem}": names.split() for stem, names in TRANSFORMERS.items()},
    **{f"ops.{stem}": of_ops(stem) for stem in {**OPS, **HELPERS}},
    **{f"megatron.{stem}": names for stem, names in MEGATRON.items()},
    **{f"chunked_loss.{stem}": names for stem, names in chunked_loss.CHUNKED_LOSS.items()},
}


# Names that modules of the package import from its others. They are served, but not listed.
IMPORTED_IN_OPS = (
    "BLOCK_M_TOKEN amp_custom_bwd amp_custom_fwd calculate_settings compare_version device_context ensure_contiguous "
    "infer_device infer_device_arch is_hip is_npu_available"
).split()
IN_CHUNKED_LOSS = [name for names in chunked_loss.CHUNKED_LOSS.values() for name in names]


def imported_names(module: str) -> list[str]:
    parent, _, stem = module.partition(".")
    if parent == "ops":
        return IMPORTED_IN_OPS
    if parent == "chunked_loss":
        return IN_CHUNKED_LOSS
    if module == "transformers.grpo_loss":
        return ["GrpoLossFunction", "LigerFusedLinearPPOBase", "_masked_mean", "_reduce_grpo_loss", "get_gamma_weights"]
    if module == "transformers.monkey_patch":
        return ["PEFT_AVAILABLE", *MODULES["transformers"]]
    if parent == "transformers" and stem:
        return ["CrossEntropyOutput", *MODULES["ops"]]
    return []


def value(module: str, name: str) -> Any:
    if name == "AutoLigerKernelForCausalLM":
        from ..transformers import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM
    parent, _, stem = module.partition(".")
    if parent == "ops":
        stems = [
            s for s in ([stem] if stem else missing.RAW) if name in raw_names(s) or missing.is_private_kernel(name)
        ]
        if stems:
            return missing.raw(f"{PACKAGE}.{module}.{name}", f"{PACKAGE}.ops.{stems[0]}", OPS.get(stems[0], "").split())
    if module == "functional":
        sources: tuple[Any, ...] = (functional,)
    elif parent == "chunked_loss" or stem == "grpo_loss":
        # A name here may be that of another class in ops.
        sources = (chunked_loss, chunked_policy, chunked_distillation, bases, utils)
    else:
        formulas = activations, attention, hyper_connections, norms
        sources = (functions, layers, mlps, ops, patching, *formulas, helpers, megatron, utils, chunked_policy)
    members: list[Any] = [*map(vars, sources), patching.APPLIERS]
    return ChainMap(*members)[name]


class LazyMembers(Mapping):
    """The members of a module, created on access because some need transformers."""

    def __init__(self, module: str) -> None:
        self.module, self.names = module, MODULES.get(module, [])

    def __getitem__(self, name: str) -> Any:
        private = self.module.startswith("ops.") and missing.is_private_kernel(name)
        if name not in self.names and name not in imported_names(self.module) and not private:
            raise KeyError(name)
        return value(self.module, name)

    def __iter__(self) -> Any:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def module_members(module: str) -> Mapping[str, Any] | None:
    """The members of the module with this path below the package: an empty mapping if it only holds modules."""
    if module in MODULES or module == "" or any(path.startswith(f"{module}.") for path in MODULES):
        return LazyMembers(module)
    return None


def submodules(module: str) -> set[str]:
    """The last parts of the paths one below this one."""
    prefix = f"{module}." if module else ""
    below = (path.removeprefix(prefix) for path in MODULES if path.startswith(prefix))
    return {path.partition(".")[0] for path in below}


def served(path: str) -> bool:
    """Whether a name of the package works. path: below the package."""
    module, _, name = path.rpartition(".")
    members = module_members(module)
    return members is not None and name in members and not isinstance(members[name], missing.Raw)
