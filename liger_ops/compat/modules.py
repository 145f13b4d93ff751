"""The names in each module of the package."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from . import (
    chunked_distillation,
    chunked_loss,
    chunked_policy,
    functional,
    functions,
    layers,
    mlps,
    ops,
    patching,
    signatures,
    utils,
)

# Module below `liger_kernel.transformers`: names.
TRANSFORMERS = {
    "auto_model": "AutoLigerKernelForCausalLM",
    "cross_entropy": "LigerCrossEntropyLoss",
    "fused_add_rms_norm": "LigerFusedAddRMSNorm",
    "fused_ce_tvd": "LigerFusedCETVDLoss",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
    "fused_linear_jsd": "LigerFusedLinearJSD",
    "fused_linear_kl_div": "LigerFusedLinearKLDivLoss",
    "geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
    "jsd": "LigerJSD",
    "kl_div": "LigerKLDIVLoss",
    "layer_norm": "LigerLayerNorm",
    "llama4_rope": ("apply_liger_llama4_rope_full liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb"),
    "mlp": "LigerFalconH1MLP LigerMLP",
    "monkey_patch": " ".join(
        ["MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance", *patching.APPLIERS]
    ),
    "qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
    "relu_squared": "LigerReLUSquared",
    "rms_norm": " ".join(name for name in vars(layers) if name.startswith("LigerRMSNorm")),
    "rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
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
    "cross_entropy": "LigerCrossEntropyFunction",
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
    "geglu": "LigerGELUMulFunction",
    "jsd": "LigerJSDFunction",
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "mlp": "LigerMLPFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "swiglu": "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction",
    "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    "tvd": "LigerTVDLossFunction",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction",
}
# Path below the package: names.
MODULES: dict[str, list[str]] = {
    "chunked_loss": [name for names in chunked_loss.CHUNKED_LOSS.values() for name in names if name.endswith("Loss")],
    "functional": list(signatures.FUNCTIONAL),
    "utils": (
        "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device infer_device_arch is_npu_available "
        "is_peft_available transformers_version_dispatch"
    ).split(),
    "ops": " ".join(OPS.values()).split(),
    "ops.grpo_loss": ["fused_selective_log_softmax"],
    "transformers": [
        "is_transformers_available",
        *(name for name in " ".join(TRANSFORMERS.values()).split() if not name.startswith("MODEL_TYPE")),
    ],
    "transformers.experimental": ["LigerEmbedding"],
    "transformers.experimental.embedding": ["LigerEmbedding"],
    "transformers.functional": functions.FUNCTIONAL,
    "transformers.grpo_loss": ["fused_selective_log_softmax", "triton_grpo_loss"],
    "transformers.model.loss_utils": functions.LOSS_UTILS,
    "transformers.trainer_integration": ["_apply_liger_kernel", "_apply_liger_kernel_to_instance"],
    **{f"transformers.{stem}": names.split() for stem, names in TRANSFORMERS.items()},
    **{f"ops.{stem}": names.split() for stem, names in OPS.items()},
    **{f"chunked_loss.{stem}": names for stem, names in chunked_loss.CHUNKED_LOSS.items()},
}


def value(module: str, name: str) -> Any:
    if name == "AutoLigerKernelForCausalLM":
        from ..transformers import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM
    if module in ("functional", "utils"):
        return getattr({"functional": functional, "utils": utils}[module], name)
    if module.startswith("chunked_loss") or module.endswith("grpo_loss"):
        # A name here may be that of another class in ops.
        sources: tuple[Any, ...] = (chunked_loss, chunked_policy, chunked_distillation)
    else:
        sources = (functions, layers, mlps, ops, patching)
    members: list[Any] = [*map(vars, sources), patching.APPLIERS]
    return ChainMap(*members)[name]


class LazyMembers(Mapping):
    """The members of a module, created on access because some need transformers."""

    def __init__(self, module: str) -> None:
        self.module, self.names = module, MODULES.get(module, [])

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
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
