"""Names of the package that liger_ops does not serve: why, and what to use instead."""

from __future__ import annotations

from typing import Any, NamedTuple


class Reason(NamedTuple):
    why: str
    instead: str


NO_REGISTRY = Reason(
    "Each operator has one implementation. There is no registry of others, such as backends for other hardware",
    "the operator itself, in liger_ops.functional",
)
NO_TUNING = Reason("Operators choose the settings of their kernels", "the operators of liger_ops.functional")
ANOTHER_DEVICE = Reason("It serves devices for which liger_ops has no kernels", "torch's own API of that device")
PATCHES = Reason(
    "liger_ops rewrites the forward of the model it is given",
    "apply_liger_kernel_to_llama() and the like, or liger_ops.transformers.apply_liger_kernel(model)",
)
PRIVATE = Reason("It is private to liger_kernel", "the public functions of its module")
# Path below the package, or the beginning of one that ends at a dot: why it is not served. The longest counts.
REASONS = {
    "": Reason("liger_ops does not know the name", "the operators of liger_ops.functional, or liger_kernel itself"),
    **dict.fromkeys(("available_backends", "available_impls", "backends", "get_backend", "get_impl", "set_backend",
                     "set_impl", "testing", "ops.backends"), NO_REGISTRY),
    **dict.fromkeys(("ops.cute", "ops.cutedsl", "ops.cutile", "ops._nvidia_shared"), NO_REGISTRY),
    **dict.fromkeys(("ops.configure", "ops.experimental.mm_int8int2.get_autotune_config", "ops.mlp.get_bucket_m",
                     *(f"ops.{stem}.get_num_warps" for stem in ("fused_ce_tvd", "fused_linear_kl_div", "kl_div", "tvd")),
                     *(f"ops.{stem}.MAX_FUSED_SIZE" for stem in (
                         "cross_entropy", "fused_ce_tvd", "fused_linear_cross_entropy", "fused_linear_jsd",
                         "fused_linear_kl_div", "group_norm", "jsd", "kl_div", "tvd", "vocab_parallel_cross_entropy"))),
                    NO_TUNING),
    "ops.fused_moe_kernels": Reason("They are Triton kernels", "liger_kernel.ops.fused_moe.LigerFusedMoEFunction.apply"),
    **dict.fromkeys(("ops.utils.get_npu_core_count", "ops.utils.set_large_grf_mode"), ANOTHER_DEVICE),
    "megatron": Reason(
        "It replaces functions inside Megatron-Core",
        "LigerMegatronRMSNorm, LigerMegatronCrossEntropy and LigerMegatronSwiGLU in the specification of the layers",
    ),
    "transformers.fsdp": Reason(
        "The fused loss runs inside the call of the head", "FSDP as for any other model"
    ),
    "transformers.model": PATCHES,
    "transformers.model.output_classes": Reason(
        "Patched models return the output class of transformers", "the model's own output class"
    ),
    "transformers.moe": Reason(
        "It needs the native package liger_cute_kernels", "experts over many devices, as docs/distributed.md says"
    ),
    "transformers.trainer": Reason(
        "It derives from the ORPOTrainer of some TRL releases", "LigerFusedLinearORPOLoss or liger_ops.losses.orpo_loss"
    ),
    "triton": Reason(
        "Kernels come from the packs that liger_ops ships", "Triton's own cache"
    ),
}  # fmt: skip


def reason(path: str) -> Reason:
    """path: below the package."""
    private = path.rpartition(".")[2].startswith("_")
    while path and path not in REASONS:
        path = path.rpartition(".")[0]
    return PRIVATE if private and not path else REASONS[path]


def no_counterpart(name: str) -> str:
    """The message about a name of the package."""
    why, instead = reason(name.partition(".")[2])
    return f"liger_ops.compat: {name} has no counterpart in liger_ops. {why}. Use {instead}."


# ---- Halves of the package's functions, and its Triton kernels

# Module below `liger_kernel.ops`: kernels and functions that launch them. Their arguments are those of the package's
# kernels, so there is nothing to serve; but the names can be imported.
RAW = {
    "attn_res": "attn_res_backward attn_res_forward",
    "cross_entropy": "cross_entropy_backward cross_entropy_forward liger_cross_entropy_kernel",
    "dyt": "liger_dyt_bwd liger_dyt_fwd",
    "experimental.embedding": "embedding_backward_kernel embedding_forward_kernel",
    "experimental.mm_int8int2": "matmul_kernel",
    "fused_add_rms_norm": "fused_add_rms_norm_backward fused_add_rms_norm_forward",
    "fused_ce_tvd": "fused_ce_tvd_backward fused_ce_tvd_forward",
    "fused_linear_cross_entropy": (
        "element_mul_kernel fused_linear_cross_entropy_backward fused_linear_cross_entropy_forward "
        "liger_cross_entropy_kernel"
    ),
    "fused_linear_jsd": "element_mul_kernel fused_linear_jsd_backward fused_linear_jsd_forward",
    "fused_linear_kl_div": "element_mul_kernel fused_linear_kl_div_backward fused_linear_kl_div_forward",
    "fused_neighborhood_attention": "fused_neighborhood_attention_forward",
    "geglu": "geglu_backward geglu_forward",
    "group_norm": "group_norm_backward group_norm_forward",
    "jsd": "jsd_backward jsd_forward",
    "kl_div": "kldiv_backward_triton kldiv_forward_triton",
    "layer_norm": "layer_norm_backward layer_norm_forward",
    "llama4_rope": "llama4_rope_forward",
    "mhc": (
        "mhc_mm_norm_bwd mhc_mm_norm_fwd mhc_post_res_bwd mhc_post_res_fwd mhc_pre_bwd mhc_pre_fwd mhc_sinkhorn_bwd "
        "mhc_split_sinkhorn_fwd"
    ),
    "mlp": "gemm_swiglu swiglu_backward_dGU swiglu_backward_dI",
    "modulated_rms_norm": "modulated_rms_norm_backward modulated_rms_norm_forward",
    "poly_norm": "poly_norm_backward poly_norm_forward",
    "qwen2vl_mrope": "qwen2vl_mrope_backward qwen2vl_mrope_forward",
    "relu_squared": "relu_squared_backward relu_squared_forward",
    "rms_norm": "rms_norm_backward rms_norm_forward",
    "rope": "rope_backward rope_forward",
    "swiglu": "silu swiglu_backward swiglu_forward swiglu_fused_gate_up_backward swiglu_fused_gate_up_forward",
    "tvd": "tv_distance_forward_triton tvd_backward_triton",
    "utils": "element_mul_kernel",
    "vocab_parallel_cross_entropy": "liger_vocab_parallel_ce_backward_kernel liger_vocab_parallel_ce_forward_kernel",
}


def is_private_kernel(name: str) -> bool:
    """Whether it looks like one of the kernels that modules of `liger_kernel.ops` do not export."""
    return name.startswith("_") and "_kernel" in name and name.isidentifier()


class Raw:
    """A kernel of the package, or a function that launches one. Every use says what to call instead."""

    def __init__(self, name: str, instead: str) -> None:
        self.__name__, self.instead = name, instead

    def message(self) -> str:
        name = f"liger_ops.compat: {self.__name__}"
        return f"{name} launches kernels of liger_kernel, which liger_ops does not have. Call {self.instead}."

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(self.message())

    __getitem__ = __call__

    def __getattr__(self, name: str) -> Any:
        """Such as `kernel.fn`."""
        raise AttributeError(f"{self.message()} It has no {name}." if name[0] != "_" else name)

    def __repr__(self) -> str:
        return f"<{self.__name__} of liger_kernel: call {self.instead}>"


# Kernels of modules without a function of autograd.
INSTEAD = {
    "element_mul_kernel": "torch.mul",
    "matmul_kernel": "liger_kernel.ops.experimental.mm_int8int2.matmul",
    "silu": "torch.nn.functional.silu",
}


def raw(name: str, module: str, functions: list[str]) -> Raw:
    """functions: those of the module that a caller may call instead."""
    calls = [f"{module}.{f}.apply" for f in functions if f.endswith("Function")]
    return Raw(name, INSTEAD.get(name.rpartition(".")[2]) or " or ".join(calls) or PRIVATE.instead)
