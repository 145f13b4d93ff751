"""verl 0.9 with the operators: the log-probabilities and entropies of its fused kernels.

    import liger_ops.integrations.verl
    print(liger_ops.integrations.verl.patch())

Run this in every worker process, with `actor_rollout_ref.model.use_fused_kernels=True`; `unpatch()` undoes it. Both of
verl's backends, "torch" and "triton", then run `fused_linear_log_probs`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import functional as F
from ._replacing import Replacements, Report

__all__ = ["FusedLinearForPPO", "linear_cross_entropy", "patch", "unpatch"]

LINEAR_CROSS_ENTROPY = "verl.utils.kernel.linear_cross_entropy.linear_cross_entropy"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """hidden: (..., n), weight: (V, n), labels: (...) -> log-probabilities (N,), or their sum or mean, and entropies
    (N,), both fp32. Over a process group that splits the vocabulary, verl's own kernels run."""
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        return REPLACEMENTS.original(LINEAR_CROSS_ENTROPY)(
            hidden, weight, labels, temperature, reduction, dist_process_group
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"linear_cross_entropy: reduction must be none, sum or mean (got {reduction})")
    found = log_probs(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature)
    return found.log_probs if reduction == "none" else getattr(found.log_probs, reduction)(), found.entropy


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Any:
    # verl asks for the entropy to log it. If its loss has an entropy bonus, backward recomputes the logits.
    return F.fused_linear_log_probs(hidden, weight, labels, temperature=temperature, entropy=True)


class FusedLinearForPPO(torch.nn.Module):
    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        """Both arguments are ignored."""
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """hidden_states: (..., n), vocab_weights: (V, n), input_ids: (...) -> log-probabilities in fp32 and entropies
        in the dtype of the hidden states, (...) each."""
        found = log_probs(hidden_states, vocab_weights, input_ids.to(torch.int64), temperature)
        return found.log_probs, found.entropy.to(hidden_states.dtype)


REPLACEMENTS = Replacements(
    "verl",
    {
        LINEAR_CROSS_ENTROPY: linear_cross_entropy,
        "verl.utils.experimental.torch_functional.FusedLinearForPPO": FusedLinearForPPO,
    },
    {"verl.utils.torch_functional.logprobs_from_logits": "takes logits that exist already"},
)


def patch() -> Report:
    """Puts the functions above in place of verl's, in all modules that hold them."""
    return REPLACEMENTS.patch()


def unpatch() -> None:
    REPLACEMENTS.unpatch()
