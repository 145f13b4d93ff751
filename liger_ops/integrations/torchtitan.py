"""torchtitan 0.3 with the operators, as overrides of its configuration. Models and parallel plans stay torchtitan's.

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b --override.imports \\
        liger_ops.integrations.torchtitan.{rms_norm,feed_forward,grouped_experts,rope,loss}

Checkpoints and sharding plans are unchanged. So are parameters, except that experts hold gate and up in one. Works with
FSDP2, tensor, sequence, expert and context parallelism, activation checkpoints and torch.compile, under each of
torchtitan's `spmd_backend` values; expert parallelism is tested with those of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts

from .. import functional as F

__all__ = ["feed_forward", "grouped_experts", "loss", "rms_norm", "rope"]


def typed(compute: Callable[..., Any], *like: Tensor) -> Any:
    """compute(*like). For torchtitan's SPMD type checker, which does not know the operators, results have the types of
    the arguments."""
    if not spmd.is_type_checking():
        return compute(*like)
    with spmd.no_typecheck():
        found = compute(*like)
        for result, argument in zip(found if isinstance(found, tuple) else (found,), like):
            spmd.assert_type_like(result, argument)
    return found


def typed_product(compute: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """As typed(). Where ranks have different weights, they have different results of the same x."""
    if not spmd.is_type_checking():
        return compute(x)
    with spmd.no_typecheck():
        found, of_weight = compute(x), spmd.get_local_type(weight)
        types = {a: spmd.V if of_weight.get(a) is spmd.V else of for a, of in spmd.get_local_type(x).items()}
        spmd.assert_type(found, types, spmd.get_partition_spec(x))
    return found


class LigerRMSNorm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    # Sharding plans name the argument `input`.
    def forward(self, input: Tensor) -> Tensor:
        # PyTorch rounds half-precision rows after the multiplication by the weight, which is called "gemma".
        return typed(lambda x: F.rms_norm(x, self.weight, self.eps, 0.0, "gemma"), input)


class LigerFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        # Selective checkpoints save the outputs of linear layers and recompute the swiglu. They would recompute a
        # swiglu_linear together with its GEMM.
        return self.w2(typed(F.swiglu, self.w1(x), self.w3(x)))


class LigerSigmoidGatedFeedForward(SigmoidGatedFeedForward, LigerFeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(SigmoidGatedFeedForward.Config):
        pass


def local(t: Any) -> Any:
    return t.to_local() if isinstance(t, DTensor) else t


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """torchtitan computes experts in bfloat16."""
    first, last = (None if b is None else b.bfloat16() for b in (gate_up_bias, down_bias))
    out = F.moe_experts_sorted(
        x.bfloat16(), gate_up.bfloat16(), down.bfloat16(), counts, first, last, interleaved=True, **options
    )
    return out.type_as(x)


class LigerGroupedExperts(FusedGroupedExperts):
    """Its parameter w13 is (E, F, 2, D): gate and up alternate. Checkpoints have w1_EFD and w3_EFD."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        gate_up, down = local(self.w13), local(self.w2_EDF)

        def compute(x: Tensor) -> Tensor:
            # FSDP's shards do not always allow a view.
            halves = gate_up.reshape(len(gate_up), -1, gate_up.shape[-1])
            return experts(x, halves, down, num_tokens_per_expert_E)

        return typed_product(compute, x_RD, self.w2_EDF)


class LigerGptOssGroupedExperts(GptOssGroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        gate_up, down = local(self.mlp1_weight_EGD), local(self.mlp2_weight_EDF)
        # Results of ranks that share an expert are added up, and so are their biases.
        group = tensor_parallel_group(getattr(self.mlp1_weight_EGD, "device_mesh", None))
        last = ScaleBiasForward.apply(local(self.mlp2_bias_ED), 1 if group is None else group.size(), torch.bfloat16)
        first, options = local(self.mlp1_bias_EG), {"limit": self.swiglu_limit, "alpha": 1.702, "up_offset": 1.0}
        return typed_product(
            lambda x: experts(x, gate_up, down, num_tokens_per_expert_E, first, last, **options),
            x_RD,
            self.mlp2_weight_EDF,
        )


class LigerRoPE(RoPE):
    """The cache is real: cos and sin side by side, (max_seq_len, 2 * dim)."""

    interleaved: bool

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """query: (B, S, Hq, D), key: (B, S, Hk, D), positions: (B, S)"""
        cos, sin = self._reshape_cache(query, positions).squeeze(2).chunk(2, -1)

        def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = F.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=self.interleaved)
            return q.transpose(1, 2), k.transpose(1, 2)

        return typed(turn, query, key)


class LigerComplexRoPE(LigerRoPE, ComplexRoPE):
    interleaved = True

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        angles = ComplexRoPE._precompute_cache(self).repeat_interleave(2, -1)
        return torch.cat((angles.real, angles.imag), -1)


class LigerCosSinRoPE(LigerRoPE, CosSinRoPE):
    interleaved = False

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass


class LigerLoss(ChunkedLossWrapper):
    """The sum of the tokens' cross entropies over the number of all tokens, without storing all logits at once. The
    trainer hands a ChunkedLossWrapper the head, and hidden states in place of logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        memory_budget: int | None = None
        """Limit on the bytes of the logits that exist at the same time."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        # The operator is one node in any graph: there is nothing to compile.
        self.classes = config.loss_fn.global_vocab_size
        self.memory_budget = config.memory_budget
        self.lm_head = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """The loss runs inside the call of the head, where FSDP has gathered its parameters."""
        super().set_lm_head(lm_head)
        logits = lm_head.forward

        def forward(input: Tensor, labels: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
            return logits(input) if labels is None else self.of_hidden_states(input, labels, tokens)

        lm_head.forward = forward

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """pred: hidden states (B, S, H), labels: (B, S)"""
        assert self.lm_head is not None, "torchtitan's trainer calls set_lm_head first"
        with spmd.no_typecheck():
            loss = self.lm_head(pred, labels, global_valid_tokens)
        if spmd.is_type_checking():
            spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}

    def of_hidden_states(self, hidden: Tensor, labels: Tensor, tokens: Tensor | None) -> Tensor:
        assert self.lm_head is not None
        mesh = hidden.device_mesh if isinstance(hidden, DTensor) else current_spmd_mesh()
        group = tensor_parallel_group(mesh)
        rows = hidden.placements if isinstance(hidden, DTensor) else ()
        x, weight, bias = of_rows(hidden, rows), of_rows(self.lm_head.weight, rows), of_rows(self.lm_head.bias, rows)
        target = labels.to_local() if isinstance(labels, DTensor) else labels
        # Weights of tokens cost nothing. A division of the loss would take another pass over the gradients.
        share = None if tokens is None else tokens.float().reciprocal().expand(target.shape)
        options = {"reduction": "sum", "ignore_index": IGNORE_INDEX, "token_weight": share,
                   "memory_budget": self.memory_budget}  # fmt: skip
        if group is not None:
            split = x.shape[1] != target.shape[1]
            if not split and not rows:
                # torchtitan adds up the gradients of a replicated tensor, which the operator has added up already.
                # In backward, this passes the sum on in one rank, and zeros in the others.
                x = spmd.convert(x, group, src=spmd.R, dst=spmd.I, expert_mode=True)
            options |= {"group": group.group_name, "classes": self.classes, "sequence_dim": 1 if split else None}
        loss = F.fused_linear_cross_entropy(x, weight, target, bias, **options)
        if not isinstance(labels, DTensor):
            return loss
        return DTensor.from_local(loss, mesh, [Partial() if p.is_shard() else Replicate() for p in labels.placements])


def tensor_parallel_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    names = [] if mesh is None else [*(mesh.mesh_dim_names or ())]
    return mesh.get_group("tp") if mesh is not None and "tp" in names and mesh.size(names.index("tp")) > 1 else None


def of_rows(t: Any, rows: Sequence[Placement]) -> Any:
    """The local part of hidden states or of a parameter. A parameter's gradient is a sum over the devices that share
    the rows; over those that share the vocabulary, the operator adds up the gradient of the hidden states."""
    if not isinstance(t, DTensor):
        return t
    gradient = [Partial() if row.is_shard() and not own.is_shard() else own for own, row in zip(t.placements, rows)]
    return t.to_local(grad_placements=gradient)


@override(target=RMSNorm.Config, exact=True, description="RMSNorm of liger_ops")
def rms_norm(cfg: RMSNorm.Config, *, gather: bool = True) -> RMSNorm.Config:
    """Without `gather`, the last norm's output stays split along the sequence under sequence parallelism. `loss` takes
    that and gathers it chunk by chunk; no other loss does."""
    norm = derive(cfg, LigerRMSNorm.Config)
    plan = norm.sharding_config
    if not gather and plan is not None and plan.out_dst_shardings is not None and plan.out_src_shardings.partition_spec:
        norm.sharding_config = replace(plan, out_dst_shardings=None)
    return norm


@override(target=FeedForward.Config, description="SwiGLU of liger_ops")
def feed_forward(cfg: FeedForward.Config) -> FeedForward.Config:
    return replaced(cfg, {FeedForward: LigerFeedForward, SigmoidGatedFeedForward: LigerSigmoidGatedFeedForward})


@override(target=GroupedExperts.Config, description="experts of liger_ops")
def grouped_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    ours = {FusedGroupedExperts: LigerGroupedExperts, GptOssGroupedExperts: LigerGptOssGroupedExperts}
    return replaced(fused_grouped_experts(cfg), ours)


@override(target=RoPE.Config, description="RoPE of liger_ops")
def rope(cfg: RoPE.Config) -> RoPE.Config:
    return replaced(cfg, {ComplexRoPE: LigerComplexRoPE, CosSinRoPE: LigerCosSinRoPE})


@override(target=BaseLoss.Config, fqns=["loss"], description="fused linear cross entropy of liger_ops")
def loss(cfg: BaseLoss.Config, *, memory_budget: int | None = None) -> LigerLoss.Config:
    inner = cfg.loss_fn if type(cfg) is ChunkedLossWrapper.Config else cfg
    if type(inner) is not CrossEntropyLoss.Config:
        raise ValueError(f"loss: its configuration must be a CrossEntropyLoss, chunked or not (got {cfg})")
    return LigerLoss.Config(loss_fn=inner, memory_budget=memory_budget)


def replaced(cfg: Any, ours: dict[Any, Any]) -> Any:
    """Other subclasses, such as quantised ones, stay as they are."""
    found = {cls.Config: own for cls, own in ours.items()}.get(type(cfg))
    return cfg if found is None else derive(cfg, found.Config)
