"""Which names the modules of the package hold."""

from __future__ import annotations

from typing import Any

from . import layers, ops, patching
from .layers import functional

TRANSFORMERS = {
    "auto_model": ["AutoLigerKernelForCausalLM"],
    "cross_entropy": ["LigerCrossEntropyLoss"],
    "fused_add_rms_norm": ["LigerFusedAddRMSNorm"],
    "fused_linear_cross_entropy": ["LigerFusedLinearCrossEntropyLoss"],
    "geglu": ["LigerGEGLUMLP"],
    "layer_norm": ["LigerLayerNorm"],
    "llama4_rope": ["liger_llama4_text_rotary_pos_emb"],
    "monkey_patch": [
        "MODEL_TYPE_TO_APPLY_LIGER_FN",
        "_apply_liger_kernel",
        "_apply_liger_kernel_to_instance",
        *patching.APPLIERS,
    ],
    "qwen2vl_mrope": ["liger_multimodal_rotary_pos_emb"],
    "rms_norm": ["LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3"],
    "rope": ["liger_rotary_pos_emb"],
    "swiglu": ["LigerBlockSparseTop2MLP", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP", "LigerSwiGLUMLP"],
}
OPS = {
    "cross_entropy": ["LigerCrossEntropyFunction"],
    "fused_add_rms_norm": ["LigerFusedAddRMSNormFunction"],
    "fused_linear_cross_entropy": ["LigerFusedLinearCrossEntropyFunction"],
    "geglu": ["LigerGELUMulFunction"],
    "layer_norm": ["LigerLayerNormFunction"],
    "llama4_rope": ["LigerLlama4RopeFunction"],
    "qwen2vl_mrope": ["LigerQwen2VLMRopeFunction"],
    "rms_norm": ["LigerRMSNormFunction"],
    "rope": ["LigerRopeFunction"],
    "swiglu": ["LigerSiLUMulFunction"],
}


def value(name: str) -> Any:
    if name == "AutoLigerKernelForCausalLM":
        from ..transformers import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM
    for module in (layers, ops, patching):
        if hasattr(module, name):
            return getattr(module, name)
    return patching.APPLIERS[name]


class Lazy(dict):
    """Values made when they are asked for: some need transformers."""

    def __init__(self, names: Any) -> None:
        super().__init__(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Any:
        return value(name)


def contents(module: str) -> dict[str, Any] | None:
    """The names in a module, by its path below the package."""
    if module in ("", "transformers.trainer_integration"):
        return {} if module == "" else Lazy(["_apply_liger_kernel_to_instance"])
    if module == "transformers":
        return Lazy(name for names in TRANSFORMERS.values() for name in names if not name.startswith("MODEL_TYPE"))
    if module == "transformers.functional":
        return functional
    if module == "ops":
        return Lazy(name for names in OPS.values() for name in names)
    package, _, stem = module.partition(".")
    names = {"transformers": TRANSFORMERS, "ops": OPS}.get(package, {}).get(stem)
    return None if names is None else Lazy(names)
