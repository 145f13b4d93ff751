"""Several linear projections of one input. In backward, the input's gradients accumulate inside the GEMMs; autograd
would add them in separate passes. A single projection may still use a faster GEMM.

Projections may be LoRA layers of peft, whose adapters one operator adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .adapters import gated_lora_projection, lora_projections
from .layers import HAS_LIBRARY, autocast_dtype, has_hooks, is_bare_linear
from .packed import Packed
from .peft import Adapted, Called, base_of, has_adapters, input_dtype, is_lora, read

# Number of elements from which a pass over a tensor takes longer than a Python autograd function.
LARGE = 1 << 22


def saves_passes(x: Tensor) -> bool:
    """Whether it is faster to accumulate the gradients of x inside the GEMMs."""
    if not (HAS_LIBRARY and x.requires_grad and torch.is_grad_enabled()) or autocast_dtype(x) is not None:
        return False
    if torch.compiler.is_compiling():
        return True
    # _Projections has no rules for function transforms.
    return x.numel() >= LARGE and not torch._C._are_functorch_transforms_active()


def recipe_of(linear: nn.Module, x: Tensor) -> str:
    """Of a layer that `liger_ops.transformers.linears` has patched, if it computes in FP8 for this input, else "".
    Evaluation and generation stay in the dtype of the weight, and so do DTensors."""
    recipe = getattr(type(linear), "liger_fp8", "")
    if not recipe or not linear.training or any(hasattr(t, "device_mesh") for t in (x, linear.weight)):
        return ""
    return recipe if autocast_dtype(x) is not None or x.dtype == linear.weight.dtype else ""


def projected_in_fp8(linears: Sequence[Any], x: Tensor) -> Tensor | None:
    """The results of several layers side by side, from x quantised once, or None if they must be called."""
    recipes = {recipe_of(linear, x) for linear in linears}
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(recipes) > 1 or "" in recipes or len(biases) not in (0, len(linears)):
        return None
    if any(has_hooks(linear) or "forward" in linear.__dict__ for linear in linears):
        return None
    weights = [linear.weight for linear in linears]
    return torch.ops.liger.fp8_projections(x, weights, biases, recipe=recipes.pop())


def split(results: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    return results.split([linear.weight.shape[0] for linear in linears], -1)


def may_choose_gemm(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two matrices, with the faster GEMM."""
    return torch.ops.liger._mm(a, b) if may_choose_gemm(a) else a @ b


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        rows = x.flatten(0, -2)
        return tuple(
            # Not a view: backward reuses this memory only if there is no other reference to it.
            torch.ops.aten._unsafe_view(multiply(rows, weight.t()), (*x.shape[:-1], weight.shape[0]))
            if bias is None
            else functional.linear(x, weight, bias)
            for weight, bias in zip(weights, biases)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        count, needed = len(weights), ctx.needs_input_grad
        rows = x.flatten(0, -2)
        arrived = [(i, grad.flatten(0, -2)) for i, grad in enumerate(grads) if grad is not None]
        dx: Tensor | None = None
        dweights: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * count
        if needed[0] and arrived:
            if torch.is_grad_enabled():  # double backward
                dx = sum(grad @ weights[i] for i, grad in arrived)
            else:
                dx = torch.ops.liger._projections_grad([g for _, g in arrived], [weights[i] for i, _ in arrived])
            dx = dx.view(x.shape)
        for i, grad in arrived:
            if needed[2 + i]:
                dweights[i] = grad.t() @ rows if torch.is_grad_enabled() else multiply(grad.t(), rows)
            if needed[2 + count + i]:
                dbiases[i] = grad.sum(0)
        return dx, None, *dweights, *dbiases


def project_adapted(states: Sequence[Adapted], x: Tensor) -> tuple[Tensor, ...]:
    called = [state.weight if isinstance(state.weight, Called) else None for state in states]
    layers = [layer.layer for layer in called if layer is not None]
    side_by_side = projected_in_fp8(layers, x) if len(layers) == len(states) > 1 else None
    results: list[Any]
    if side_by_side is not None:
        results = [*split(side_by_side, layers)]
    else:
        results = [layer and layer.layer(x) for layer in called]
    together: dict[torch.dtype, list[int]] = {}
    for i, (state, result) in enumerate(zip(states, results)):
        if called[i] is None or state.a:
            together.setdefault(input_dtype(state, result), []).append(i)
    for dtype, members in together.items():
        # Autocast and quantised layers cast their input, and the latter their result to the input's dtype.
        add_adapters(x, x.to(dtype), members, [states[i] for i in members], results)
    return tuple(results)


def add_adapters(
    x: Tensor, cast: Tensor, members: Sequence[int], states: Sequence[Adapted], results: list[Any]
) -> None:
    """Completes the results of the members. cast: x in the operator's dtype."""
    of = [i for i, state in enumerate(states) for _ in state.a]
    a = [weight for state in states for weight in state.a]
    b = [weight for state in states for weight in state.b]
    scale = [factor for state in states for factor in state.scale]
    dropout = [rate for state in states for rate in state.dropout]
    weights: list[Tensor | Packed | None] = []
    biases: list[Tensor | None] = []
    for i, state in zip(members, states):
        if isinstance(state.weight, Called):
            result, shape = results[i], (*x.shape[:-1], len(state.b[0]))
            joins = type(result) is Tensor and result.dtype == cast.dtype and result.shape == shape
            weights.append(None)
            biases.append(result if joins else None)
        else:
            weights.append(state.weight)
            biases.append(state.bias)
    ys = lora_projections(cast, weights, biases, a, b, scale, of, dropout)
    for i, state, bias, y in zip(members, states, biases, ys):
        if isinstance(state.weight, Packed):
            y = y.to(x.dtype)
        elif isinstance(state.weight, Called) and bias is None:
            y = results[i] + y
            y = y.to(results[i].dtype) if state.weight.keeps_dtype else y
        results[i] = y


# ---- Any projections


def is_projection(module: nn.Module) -> bool:
    """Whether `project` may compute this layer, or its adapters once it has some, without calling it."""
    return is_lora(module) or (hasattr(module, "in_features") and not has_adapters(module))


def is_called(module: nn.Module) -> bool:
    """Whether a LoRA layer must be called because it is hooked or wrapped."""
    return is_lora(module) and (has_hooks(module) or "forward" in module.__dict__)


def project(linears: Sequence[nn.Module], x: Tensor, lora: bool = True) -> tuple[Tensor, ...]:
    """``tuple(linear(x) for linear in linears)``. lora: whether an operator may compute LoRA layers."""
    if lora and any(map(is_lora, linears)) and not any(map(is_called, linears)):
        states = read(linears, x)
        if states is not None and any(state.a for state in states):
            return project_adapted(states, x)
        if states is not None:  # all adapters are merged, disabled or inactive
            linears = [base_of(linear) if is_lora(linear) else linear for linear in linears]
    side_by_side = projected_in_fp8(linears, x) if len(linears) > 1 else None
    if side_by_side is not None:
        return split(side_by_side, linears)
    if (
        saves_passes(x)
        and (len(linears) > 1 or may_choose_gemm(x))
        and x.dim() > 1
        and all(is_bare_linear(linear) and linear.weight.dtype == x.dtype for linear in linears)
    ):
        parameters = [linear.weight for linear in linears] + [linear.bias for linear in linears]
        return _Projections.apply(x, len(linears), *parameters)
    return tuple(linear(x) for linear in linears)


def project_one(linear: nn.Module, x: Tensor, lora: bool = True) -> Tensor:
    """``linear(x)``, in an operator only if it is a LoRA layer."""
    return project((linear,), x, lora)[0] if is_lora(linear) else linear(x)


def project_gated(
    linear: nn.Module, op: str, options: tuple, gate: Tensor, up: Tensor, lora: bool = True
) -> Tensor | None:
    """``linear(op(gate, up, *options))`` for a LoRA layer that one operator computes, or None."""
    if not lora or not is_lora(linear) or is_called(linear):
        return None
    states = read((linear,), gate)
    if states is None or not states[0].a:
        return None
    weight, bias, a, b, scale, dropout = states[0]
    # A layer that is called needs the product. Autocast casts the product, not what it is made of.
    if isinstance(weight, Called) or {gate.dtype, up.dtype} != {weight.dtype}:
        return None
    return gated_lora_projection(op, options, gate, up, weight, bias, a, b, scale, dropout)
