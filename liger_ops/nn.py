"""Modules that use the operators: drop-in for their torch.nn counterparts, same constructors and state_dict keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import functional as F
from .functional import apply_rotary_pos_emb
from .linear.layers import is_bare_linear
from .linear.project import project

__all__ = [
    "CrossEntropyLoss",
    "Embedding",
    "FusedAddRMSNorm",
    "FusedLinearCrossEntropyLoss",
    "GEGLUMLP",
    "LayerNorm",
    "LinearLossHead",
    "RMSNorm",
    "RMSNormGated",
    "SwiGLUMLP",
    "apply_rotary_pos_emb",
]


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()


def _rows(name: str, x: Tensor, shape: list[int]) -> Tensor:
    """x with the normalised dimensions flattened into one: the operators normalise only the last dimension."""
    if list(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"{name}: input must have shape [..., {str(shape)[1:]} (got {list(x.shape)})")
    return x if len(shape) == 1 else x.flatten(-len(shape))


class RMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm`. With ``offset=1.0`` the weight is stored as its difference from one, as Gemma does.

    The defaults are those of torch, not of :func:`liger_ops.functional.rms_norm`: with `eps` None, epsilon is that of
    the dtype of the sums (`2**-23`, or `2**-52` for fp64), and with the casting mode "gemma" the result is rounded once. For
    the values of ``rms_norm(x, weight)``, pass ``eps=1e-6, casting_mode="llama"``.

    >>> RMSNorm(8, eps=1e-6)
    RMSNorm((8,), eps=1e-06, elementwise_affine=True)
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        casting_mode: str = "gemma",
    ) -> None:
        # Set first: super().__init__() calls reset_parameters(), which reads it.
        self.offset = offset
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.casting_mode = casting_mode

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def epsilon(self, x: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        # torch's default: the epsilon of the dtype it computes in, fp32 or wider. TorchScript does not support
        # torch.finfo.
        return 2.0**-52 if x.dtype == torch.float64 else 2.0**-23

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows("RMSNorm", x, list(self.normalized_shape))
        return F.rms_norm(rows, _flat(self.weight), self.epsilon(x), self.offset, self.casting_mode).view(x.shape)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


class FusedAddRMSNorm(RMSNorm):
    """``forward(x, residual) -> (norm(x + residual), x + residual)``, with the parameters of :class:`RMSNorm`."""

    # nn.Module declares forward as any callable; the stub of nn.RMSNorm narrows that.
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        name, shape = "FusedAddRMSNorm", list(self.normalized_shape)
        rows, residual = _rows(name, x, shape), _rows(name, residual, shape)
        y, s = F.fused_add_rms_norm(rows, residual, _flat(self.weight), self.epsilon(x), self.offset, self.casting_mode)
        return y.view(x.shape), s.view(x.shape)


class RMSNormGated(RMSNorm):
    """``forward(x, gate)`` of :func:`liger_ops.functional.rms_norm_gated`, with the parameters of :class:`RMSNorm`.

    >>> RMSNormGated(8, eps=1e-6)(torch.ones(2, 8), torch.zeros(2, 8)).sum()
    tensor(0., grad_fn=<SumBackward0>)
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        activation: str = "silu",
        gate_first: bool = False,
        group_size: int | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, offset=offset, casting_mode=casting_mode
        )
        self.activation, self.gate_first, self.group_size = activation, gate_first, group_size

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        shape = list(self.normalized_shape)
        rows, gates = _rows("RMSNormGated", x, shape), _rows("RMSNormGated", gate, shape)
        y = F.rms_norm_gated(
            rows,
            gates,
            _flat(self.weight),
            self.epsilon(x),
            self.offset,
            self.casting_mode,
            self.activation,
            gate_first=self.gate_first,
            group_size=self.group_size,
        )
        return y.view(x.shape)


class LayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows("LayerNorm", x, list(self.normalized_shape))
        return F.layer_norm(rows, _flat(self.weight), _flat(self.bias), self.eps).view(x.shape)


def use_torch_embedding() -> bool:
    """True inside torch.compile. Inductor of torch 2.11 writes out the whole expression of an operator's arguments. For
    the embedding's backward, the last of a model, compile time grows fourfold with every layer."""
    return torch.compiler.is_compiling()


class Embedding(nn.Embedding):
    """:class:`torch.nn.Embedding`. Uses PyTorch's own operator for max_norm, scale_grad_by_freq and sparse, and under
    torch.compile."""

    def forward(self, input: Tensor) -> Tensor:
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if not torch.jit.is_scripting():
            plain = plain and not use_torch_embedding()
        if plain:
            return F.embedding(input, self.weight, self.padding_idx)
        return nn.functional.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class _GatedMLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def reset_parameters(self) -> None:
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            projection.reset_parameters()

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"


class SwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, with the parameters of Hugging Face's LlamaMLP."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            (gate, up), down = project((self.gate_proj, self.up_proj), x), self.down_proj
            if is_bare_linear(down):
                return F.swiglu_linear(gate, up, down.weight, down.bias)
            return down(F.swiglu(gate, up))
        return self.down_proj(F.swiglu(self.gate_proj(x), self.up_proj(x)))


class GEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, with the parameters of Hugging Face's GemmaMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        approximate: str = "tanh",
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            (gate, up), down = project((self.gate_proj, self.up_proj), x), self.down_proj
            if is_bare_linear(down):
                return F.geglu_linear(gate, up, down.weight, down.bias, self.approximate)
            return down(F.geglu(gate, up, self.approximate))
        return self.down_proj(F.geglu(self.gate_proj(x), self.up_proj(x), self.approximate))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate}"


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` with z-loss and softcap; the loss is fp32 even for half-precision logits.

    As in PyTorch, classes are dimension 1 of an input with more than two dimensions. PyTorch's own operator handles
    targets that are probabilities.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.lse_square_scale = lse_square_scale
        self.softcap = softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            if self.lse_square_scale or self.softcap is not None:
                raise ValueError(
                    "CrossEntropyLoss: target must hold class indices if lse_square_scale or softcap is given "
                    "(got probabilities)"
                )
            return nn.functional.cross_entropy(
                input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
                label_smoothing=self.label_smoothing,
            )  # fmt: skip
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        return F.cross_entropy(
            logits, target, self.weight, self.reduction, self.ignore_index, self.label_smoothing, self.lse_square_scale,
            self.softcap,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return _options(
            self, reduction="mean", ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None
        )


class FusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of ``logits_scale * (input @ weight.T + bias)``, without storing all logits at once.

    ``forward(input, weight, target, bias=None, token_weight=None, low_rank_input=None, low_rank_weight=None)`` with input
    (..., n), weight (V, n), target (...). ``low_rank_input @ low_rank_weight.T`` of (..., r) and (V, r) joins the product:
    an adapter of the head. `ce_weight` holds class weights, (V,). Mind the order of input and weight: if V is the number of positions, swapped
    arguments have shapes that fit, and only the loss is wrong.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        *,
        logits_scale: float = 1.0,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("ce_weight", ce_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.lse_square_scale = lse_square_scale
        self.softcap = softcap
        self.logits_scale = logits_scale
        self.memory_budget = memory_budget

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        low_rank_input: Tensor | None = None,
        low_rank_weight: Tensor | None = None,
    ) -> Tensor:
        # The operator itself: TorchScript does not support the keyword defaults of the function in `functional`.
        return torch.ops.liger.fused_linear_cross_entropy(
            input, weight, target, bias, self.ce_weight, self.reduction, self.ignore_index, self.label_smoothing,
            self.lse_square_scale, self.softcap, logits_scale=self.logits_scale, token_weight=token_weight,
            memory_budget=self.memory_budget, low_rank_input=low_rank_input, low_rank_weight=low_rank_weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return _options(
            self, reduction="mean", ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None,
            logits_scale=1.0, memory_budget=None,
        )  # fmt: skip


class LinearLossHead(nn.Linear):
    """The output layer of a language model: logits, or with `target` the loss, computed without storing the logits.

    The weight may be a DTensor that is sharded by class, ``Shard(0)``, over one mesh dimension: the loss is then
    vocab-parallel, and `input` may be sharded along the sequence. The other arguments are those of
    :func:`liger_ops.functional.fused_linear_cross_entropy`.

    >>> head = LinearLossHead(8, 16, bias=False)
    >>> hidden, target = torch.randn(2, 3, 8), torch.randint(16, (2, 3))
    >>> head(hidden).shape
    torch.Size([2, 3, 16])
    >>> head(hidden, target).backward()
    """

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        ce_weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        logits_scale: float = 1.0,
        token_weight: Tensor | None = None,
        memory_budget: int | None = None,
    ) -> Tensor:
        if target is None:
            return nn.functional.linear(input, self.weight, self.bias)
        return torch.ops.liger.fused_linear_cross_entropy(
            input, self.weight, target, self.bias, ce_weight, reduction, ignore_index, label_smoothing,
            lse_square_scale, softcap, logits_scale=logits_scale, token_weight=token_weight,
            memory_budget=memory_budget,
        )  # fmt: skip


def _options(module: nn.Module, **defaults: object) -> str:
    """The options that differ from their defaults."""
    return ", ".join(f"{k}={getattr(module, k)!r}" for k, default in defaults.items() if getattr(module, k) != default)
