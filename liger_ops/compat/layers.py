"""The package's norms, activation, embedding and losses as modules with the same constructors and results."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from . import forms, ops
from .forms import call, define, names_of, signature_of
from .functions import cross_entropy, fused_linear_cross_entropy

layer = partial(forms.layer, __name__)

# ---- Norms


def filled_parameter(size: int | None, init_fn: str) -> nn.Parameter:
    if size is None:
        raise TypeError("hidden_size must be given for a norm with a weight (got None)")
    if init_fn not in ("ones", "zeros"):
        raise AssertionError(f"init_fn must be either 'ones' or 'zeros' (got {init_fn})")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: Any = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.elementwise_affine = elementwise_affine
        self.register_parameter("weight", filled_parameter(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    @property
    def with_scale(self) -> bool:
        return self.elementwise_affine

    def extra_repr(self) -> str:
        size = None if self.weight is None else tuple(self.weight.shape)
        return f"{size}, eps={self.variance_epsilon}, offset={self.offset}"


def norm(name: str, base: type[LigerRMSNorm] = LigerRMSNorm) -> Any:
    """A norm whose parameters are those of LigerRMSNorm with other names or defaults."""
    parameters = signature_of(__name__, name)
    body = call(LigerRMSNorm.__init__, names_of(f"self, {parameters}"))
    constructor = define("__init__", f"self, {parameters}", body, operator=LigerRMSNorm.__init__)
    return type(name, (base,), {"__module__": __name__, "__init__": constructor})


LigerRMSNormForGemma = norm("LigerRMSNormForGemma")
LigerRMSNormForGemma2 = norm("LigerRMSNormForGemma2")
LigerRMSNormForQwen3Next = type("LigerRMSNormForQwen3Next", (LigerRMSNormForGemma2,), {"__module__": __name__})
LigerRMSNormForMuseGlimmerTextCentered = type(
    "LigerRMSNormForMuseGlimmerTextCentered", (LigerRMSNormForGemma2,), {"__module__": __name__}
)
LigerRMSNormForGemma3 = norm("LigerRMSNormForGemma3")
LigerRMSNormForOlmo2 = norm("LigerRMSNormForOlmo2")
LigerRMSNormForGlm4 = type("LigerRMSNormForGlm4", (LigerRMSNormForOlmo2,), {"__module__": __name__})
LigerRMSNormForGemma4 = norm("LigerRMSNormForGemma4")
LigerRMSNormForMuseGlimmer = norm("LigerRMSNormForMuseGlimmer", LigerRMSNormForGemma4)


class LigerFusedAddRMSNorm(nn.Module):
    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = filled_parameter(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        options = self.weight, self.variance_epsilon, self.offset, self.casting_mode
        return F.fused_add_rms_norm(hidden_states, residual, *options)


class LigerLayerNorm(nn.Module):
    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", impl: Any = None,
        mode: Any = None, backend: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = self.variance_epsilon = eps
        self.impl, self.mode = impl if impl is not None else backend, mode
        self.weight = filled_parameter(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


# ---- Embedding


class LigerEmbedding(nn.Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx].zero_()

    def forward(self, indices: Tensor) -> Tensor:
        embedded = F.embedding(indices, self.weight)
        if self.padding_idx is None:
            return embedded
        # Unlike nn.Embedding, the result is zero even if the row in the weight is not.
        return embedded.masked_fill((indices == self.padding_idx).unsqueeze(-1), 0.0)


# ---- Activation and losses


def check_loss_options(loss: Any) -> None:
    if not 0 <= loss.label_smoothing <= 1:
        raise AssertionError(f"label_smoothing must be between 0.0 and 1.0 (got {loss.label_smoothing})")
    if loss.reduction not in ("mean", "sum", "none"):
        raise AssertionError(f"reduction must be 'mean', 'sum' or 'none' (got {loss.reduction})")
    if loss.softcap is not None and loss.softcap <= 0:
        raise AssertionError(f"softcap must be above 0.0 or None (got {loss.softcap})")


def check_temperature(loss: Any) -> None:
    if loss.temperature == 0:
        raise AssertionError("temperature cannot be 0.")


def check_vocab_parallel_options(loss: Any) -> None:
    if loss.reduction != "none":
        got = f"got {loss.reduction!r}"
        raise ValueError(f"Vocab-parallel CE returns per-token loss; reduction must be 'none', {got}.")
    if not 0.0 <= loss.label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), got {loss.label_smoothing}.")
    ops.validate_formula_and_mode(loss.label_smoothing_formula, loss.label_smoothing_mode)


LigerReLUSquared = layer("LigerReLUSquared", F.relu_squared)
LigerCrossEntropyLoss = layer("LigerCrossEntropyLoss", cross_entropy, check_loss_options)
LigerFusedLinearCrossEntropyLoss = layer(
    "LigerFusedLinearCrossEntropyLoss", fused_linear_cross_entropy, check_loss_options
)
LigerJSD = layer("LigerJSD", ops.jsd)
LigerTVDLoss = layer("LigerTVDLoss", ops.tvd)
LigerFusedCETVDLoss = layer("LigerFusedCETVDLoss", ops.fused_ce_tvd)
LigerFusedLinearJSD = layer("LigerFusedLinearJSD", ops.fused_linear_jsd, check_temperature)
LigerFusedLinearKLDivLoss = layer("LigerFusedLinearKLDivLoss", ops.fused_linear_kl_div, check_temperature)
LigerVocabParallelCrossEntropy = layer(
    "LigerVocabParallelCrossEntropy", ops.vocab_parallel_cross_entropy, check_vocab_parallel_options
)


class LigerKLDIVLoss(nn.KLDivLoss):
    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return ops.kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)
