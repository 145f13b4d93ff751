"""Calls of the names of liger_kernel that operators serve: each with the formula that it computes, and with inputs.

A case has a formula of tensors, the tensors for a width n, and for each name what calls it with these tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[..., Any]


class Case(NamedTuple):
    formula: Call
    inputs: Callable[[int], list[Tensor]]
    calls: dict[str, Callable[[Any], Call]]  # path below liger_kernel: a function of the tensors, made of its value
    rounds: bool = False  # intermediate results, too, to the dtype of the inputs


def draw(*shapes: tuple[int, ...] | int, scale: float = 1.0) -> list[Tensor]:
    """Leaves that require a gradient."""
    return [(scale * torch.randn(shape)).requires_grad_() for shape in shapes]


def given(*shapes: tuple[int, ...] | int) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


# ---- How a value takes the tensors


def function(*more: Any, **options: Any) -> Callable[[Any], Call]:
    """A function, or a function of autograd, that takes the tensors first."""
    return lambda value: lambda *tensors: getattr(value, "apply", value)(*tensors, *more, **options)


def first(*more: Any, **options: Any) -> Callable[[Any], Call]:
    """Of its results, the loss alone."""
    return lambda value: lambda *tensors: getattr(value, "apply", value)(*tensors, *more, **options)[0]


def module(*arguments: Any, **options: Any) -> Callable[[Any], Call]:
    """A module of the first tensors, whose parameters are the last ones."""

    def made(value: Any) -> Call:
        layer = value(*arguments, **options)
        names = [name for name, _ in layer.named_parameters()]

        def call(*tensors: Tensor) -> Any:
            split = len(tensors) - len(names)
            for name, tensor in zip(names, tensors[split:]):
                folder, _, last = name.rpartition(".")
                layer.get_submodule(folder)._parameters[last] = tensor
            return layer(*tensors[:split])

        return call

    return made


def with_weight_first(*more: Any, **options: Any) -> Callable[[Any], Call]:
    """A loss of (weight, hidden states, *more, *other tensors)."""
    return lambda value: lambda x, w, *tensors: value(**options)(w, x, *more, *tensors)


# ---- Norms


def rms_norm(eps: float, offset: float = 0.0) -> Call:
    def formula(x: Tensor, weight: Tensor | None = None) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return y if weight is None else y * (weight + offset)

    return formula


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm(1e-2, 1.0)(x + residual, weight), x + residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-2) * weight
    return y if bias is None else y + bias


def norms(n: int) -> dict[str, Case]:
    def named(names: str, offset: float) -> Case:
        calls = {f"transformers.rms_norm.LigerRMSNorm{name}": module(n, eps=1e-2) for name in names.split()}
        return Case(rms_norm(1e-2, offset), lambda n: draw((2, 3, n), n), calls)

    plain = named("ForGemma4 ForMuseGlimmer ForOlmo2 ForGlm4", 0.0)
    plain.calls["transformers.rms_norm.LigerRMSNorm"] = module(n, 1e-2)
    plain.calls["functional.rms_norm"] = function(1e-2)
    plain.calls["megatron.rms_norm.LigerMegatronRMSNorm"] = module(SimpleNamespace(), n, eps=1e-2)
    return {
        "rms_norm": plain,
        "rms_norm with an offset of its own": named(
            "ForGemma ForGemma2 ForGemma3 ForQwen3Next ForMuseGlimmerTextCentered", 1.0
        ),
        "rms_norm with options": Case(rms_norm(1e-1, 1.0), lambda n: draw((7, n), n), {
            "functional.rms_norm": function(1e-1, offset=1.0, casting_mode="gemma"),
            "transformers.functional.liger_rms_norm": function(1e-1, 1.0, "gemma"),
            "ops.rms_norm.LigerRMSNormFunction": function(1e-1, 1.0, "none", False, True),
            "transformers.rms_norm.LigerRMSNorm": module(n, 1e-1, 1.0, "gemma", "zeros"),
            "megatron.rms_norm.LigerMegatronRMSNorm": module(None, n, 1e-1, zero_centered_gamma=True),
        }),
        "rms_norm without a weight": Case(rms_norm(1e-1), lambda n: draw((7, n)), {
            "transformers.rms_norm.LigerRMSNorm": module(n, 1e-1, elementwise_affine=False),
            "transformers.rms_norm.LigerRMSNormForGemma4": module(n, 1e-1, with_scale=False),
            "transformers.rms_norm.LigerRMSNormForMuseGlimmer": module(n, 1e-1, with_scale=False),
        }),
        "fused_add_rms_norm": Case(fused_add_rms_norm, lambda n: draw((2, 3, n), (2, 3, n), n), {
            "functional.fused_add_rms_norm": function(1e-2, 1.0, "gemma"),
            "transformers.functional.liger_fused_add_rms_norm": function(1e-2, 1.0),
            "ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction": function(1e-2, 1.0, "gemma", True),
            "transformers.fused_add_rms_norm.LigerFusedAddRMSNorm": module(n, 1e-2, 1.0),
        }),
        "layer_norm": Case(layer_norm, lambda n: draw((2, 3, n), n, n), {
            "functional.layer_norm": function(1e-2),
            "transformers.functional.liger_layer_norm": function(1e-2),
            "ops.layer_norm.LigerLayerNormFunction": function(1e-2),
            "transformers.layer_norm.LigerLayerNorm": module(n, 1e-2, bias=True),
        }),
        "layer_norm without a bias": Case(layer_norm, lambda n: draw((7, n), n), {
            "functional.layer_norm": function(None, 1e-2),
        }),
    }  # fmt: skip


# ---- Activations and MLPs


def gated(activation: Call, of_gate: float = 1.0, of_product: float = 1.0) -> Call:
    return lambda gate, up: of_product * activation(of_gate * gate) * up


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def mlp(activation: Call, *scales: float) -> Call:
    """gate and up: (I, n), down: (n, I)"""
    return lambda x, gate, up, down: gated(activation, *scales)(x @ gate.mT, x @ up.mT) @ down.mT


def packed(formula: Call) -> Call:
    return lambda gate_up: formula(*gate_up.chunk(2, -1))


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """x: (T, n), gate_up: (E, 2I, n), down: (E, n, I), weights: (T, K)"""
    rows = []
    for t, chosen in enumerate(CHOSEN.tolist()):
        each = [packed(gated(silu))(x[t] @ gate_up[e].mT) @ down[e].mT for e in chosen]
        rows.append(sum(w * y for w, y in zip(weights[t], each)))
    return torch.stack(rows)


# An expert has no tokens, and the first token has the same expert twice.
CHOSEN = torch.tensor([[1, 1], [0, 2], [2, 1], [0, 1], [2, 0]])


def activations(n: int) -> dict[str, Case]:
    cases = activations_and_mlps(n)
    return {name: case._replace(rounds="MLP" in name or name == "experts") for name, case in cases.items()}


def activations_and_mlps(n: int) -> dict[str, Case]:
    def pairs(n: int) -> list[Tensor]:
        return draw((2, 3, n), (2, 3, n))

    def weights(n: int) -> list[Tensor]:
        return [*draw((2, 9, n)), *draw((n + 5, n), (n + 5, n), (n, n + 5), scale=0.3)]

    def in_parts(module: str, name: str, **options: Any) -> dict[str, Callable]:
        return {f"transformers.{module}.{name}": made_with(**options)}

    def made_with(**options: Any) -> Callable:
        def of(value: Any) -> Call:
            from transformers import FalconH1Config, LlamaConfig

            sizes = dict(hidden_size=n, intermediate_size=n + 5, num_attention_heads=1, head_dim=8)
            if "FalconH1" in value.__name__ or value.__name__ == "LigerMLP" and "mlp_multipliers" in options:
                return module(FalconH1Config(**sizes, mlp_multipliers=[0.7, 1.3]))(value)
            config = LlamaConfig(**sizes, hidden_act=options.get("act", "silu"), num_local_experts=3)
            for name in ("hidden_activation", "enable_moe_block", "num_kv_shared_layers", "use_double_wide_mlp"):
                setattr(config, name, options.get("act", "silu") if name == "hidden_activation" else 0)
            return module(config, **{k: v for k, v in options.items() if k == "num_shards"})(value)

        return of

    plain = [("swiglu", f"Liger{name}") for name in ("SwiGLUMLP", "Qwen3MoeSwiGLUMLP", "HunyuanV1SwiGLUMLP",
                                                     "SwiGLUMLPForMuseGlimmer")]  # fmt: skip
    return {
        "swiglu": Case(gated(silu), pairs, {
            "functional.swiglu": function(),
            "transformers.functional.liger_swiglu": function(),
            "ops.swiglu.LigerSiLUMulFunction": function(),
            "ops.swiglu.LigerFusedGateUpSiLUMulFunction": lambda value: lambda a, b: value.apply(torch.cat([a, b], -1)),
            "megatron.swiglu.LigerMegatronSwiGLU": lambda value: lambda a, b: value()(torch.cat([a, b], -1)),
        }),
        "swiglu with multipliers": Case(gated(silu, 2.0, 0.3), pairs, {
            "functional.swiglu": function(2.0, 0.3),
            "ops.swiglu.LigerSiLUMulFunction": function(2.0, 0.3),
        }),
        "geglu": Case(gated(tanh_gelu), pairs, {
            "functional.geglu": function(),
            "transformers.functional.liger_geglu": function(),
            "ops.geglu.LigerGELUMulFunction": function(),
        }),
        "relu_squared": Case(lambda x: x.clamp(min=0).square(), lambda n: draw((2, 3, n)), {
            "transformers.functional.liger_relu_squared": function(),
            "ops.relu_squared.LigerReLUSquaredFunction": function(),
            "transformers.relu_squared.LigerReLUSquared": module(),
        }),
        "swiglu's MLP": Case(mlp(silu), weights, {
            **{f"transformers.{where}.{name}": made_with() for where, name in plain},
            "transformers.tiled_mlp.LigerTiledSwiGLUMLP": made_with(num_shards=3),
            "transformers.mlp.LigerMLP": made_with(),
            "ops.mlp.LigerMLPFunction": function(),
        }),
        "swiglu's MLP with multipliers": Case(mlp(silu, 0.7, 1.3), weights, {
            **in_parts("swiglu", "LigerFalconH1SwiGLUMLP"),
            **in_parts("mlp", "LigerFalconH1MLP"),
            "ops.mlp.LigerMLPFunction": function(0.7, 1.3),
        }),
        "swiglu's MLP of Mixtral": Case(
            lambda x, w1, w2, w3: mlp(silu)(x, w1, w3, w2),
            lambda n: [t for i in (0, 1, 3, 2) for t in [weights(n)[i]]],
            in_parts("swiglu", "LigerBlockSparseTop2MLP"),
        ),
        "swiglu's MLP of Phi-3": Case(
            lambda x, gate_up, down: packed(gated(silu))(x @ gate_up.mT) @ down.mT,
            lambda n: [*draw((7, n)), *draw((2 * n + 10, n), (n, n + 5), scale=0.3)],
            in_parts("swiglu", "LigerPhi3SwiGLUMLP"),
        ),
        "geglu's MLP": Case(mlp(tanh_gelu), weights, {
            **in_parts("geglu", "LigerGEGLUMLP", act="gelu_pytorch_tanh"),
            **in_parts("geglu", "LigerGEGLUMLPForGemma4", act="gelu_pytorch_tanh"),
            **in_parts("tiled_mlp", "LigerTiledGEGLUMLP", act="gelu_pytorch_tanh", num_shards=3),
        }),
        "experts": Case(
            experts, lambda n: [*draw((5, n)), *draw((4, 2 * n + 10, n), (4, n, n + 5), scale=0.3), *draw((5, 2))], {
                "ops.fused_moe.LigerFusedMoEFunction": lambda value: lambda x, *w: value.apply(x, *w[:2], CHOSEN, w[2]),
            },
        ),
        "embedding": Case(lambda weight: weight[CHOSEN], lambda n: draw((4, n)), {
            "ops.experimental.embedding.LigerEmbeddingFunction": function(CHOSEN),
            "transformers.experimental.embedding.LigerEmbedding": lambda value: lambda w: module(4, n)(value)(CHOSEN, w),
        }),
    }  # fmt: skip


# ---- Rotations


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves are pairs."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: (B, H, S, D), cos, sin: (B or 1, S, D or D / 2)"""
    tables = [torch.cat([t, t], -1) if t.shape[-1] < q.shape[-1] else t for t in (cos, sin)]
    return tuple(rotated(x, *(t.unsqueeze(1) for t in tables)) for x in (q, k))


def rope_of_pictures(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: (S, H, D), cos, sin: (S, D)"""
    return tuple(rotated(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))


def rope_of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: (B, S, H, D), cos, sin: (S, D / 2). Neighbours are pairs."""

    def one(x: Tensor) -> Tensor:
        a, b, c, s = x[..., ::2], x[..., 1::2], cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    return one(q), one(k)


def mrope(n: int) -> Call:
    """cos, sin: (3, B, S, D), of time, height and width"""

    def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        parts = sections(n) * 2
        chosen = [
            torch.cat([part[i % 3] for i, part in enumerate(t.split(parts, -1))], -1).unsqueeze(1) for t in (cos, sin)
        ]
        return tuple(rotated(x, *chosen) for x in (q, k))

    return formula


def sections(n: int) -> list[int]:
    return [n - 4, 2, 2]


def of_pairs(value: Any) -> Call:
    return lambda q, k, cos, sin: getattr(value, "apply", value)(q, k, torch.complex(cos.float(), sin.float()))


def rotations(n: int) -> dict[str, Case]:
    def heads(*table: int, full: bool = True) -> Callable[[int], list[Tensor]]:
        def inputs(n: int) -> list[Tensor]:
            tables = [t.repeat_interleave(2, -1)[..., torch.arange(2 * n) % n * 2] if full else t
                      for t in given((*table, 5, n), (*table, 5, n))]  # fmt: skip
            return [*draw((2, 4, 5, 2 * n), (2, 2, 5, 2 * n)), *tables]

        return inputs

    return {
        "rope": Case(rope, heads(1), {
            "functional.rope": function(),
            "transformers.functional.liger_rope": function(),
            "ops.rope.LigerRopeFunction": function(),
            "transformers.rope.liger_rotary_pos_emb": function(),
        }),
        "rope by batch": Case(rope, heads(2), {
            "functional.rope": function(None, 1),
            "transformers.functional.liger_rope": function(None, 1, None),
        }),
        "rope of GPT-OSS": Case(rope, heads(1, full=False), {
            "transformers.rope.liger_rotary_pos_emb_gpt_oss": function(),
        }),
        "rope of pictures": Case(
            rope_of_pictures, lambda n: [*draw((5, 4, 2 * n), (5, 4, 2 * n)), *heads()(n)[2:]],
            {"transformers.rope.liger_rotary_pos_emb_vision": function()},
        ),
        "rope of pairs": Case(
            rope_of_pairs, lambda n: [*draw((2, 5, 4, 2 * n), (2, 5, 2, 2 * n)), *given((5, n), (5, n))],
            dict.fromkeys((
                "ops.llama4_rope.LigerLlama4RopeFunction",
                "transformers.llama4_rope.liger_llama4_text_rotary_pos_emb",
                "transformers.llama4_rope.liger_llama4_vision_rotary_pos_emb",
            ), of_pairs),
        ),
        "mrope": Case(mrope(n), heads(3, 2), dict.fromkeys((
            "ops.qwen2vl_mrope.LigerQwen2VLMRopeFunction",
            "transformers.functional.liger_qwen2vl_mrope",
            "transformers.qwen2vl_mrope.liger_multimodal_rotary_pos_emb",
        ), function(sections(n)))),
    }  # fmt: skip
