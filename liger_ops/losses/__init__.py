"""Post-training losses of hidden states: preference, policy gradient and distillation.

Each loss is a page of plain torch code over `fused_linear_log_probs` and `fused_linear_divergence`, written to be
read, copied and changed. Logits are never stored: memory and time beyond the operators grow with the number of
tokens. Letters: B sequences of S positions, hidden size n, V classes.

    loss, metrics = dpo_loss(hidden, head.weight, target, ref_log_probs=reference, beta=0.1)

`target` holds the token that each position predicts, or `ignore_index`; positions of prompts and padding are ignored
and cost nothing. Metrics are detached tensors. `head` takes the options of the output projection and its softmax:
`logits_scale`, `softcap`, `temperature` and `memory_budget`, as `fused_linear_log_probs` has them.
"""

from .cosine import cosine_distillation_loss
from .distillation import distillation_loss, target_distribution_loss, topk_distillation_loss
from .grpo import grpo_loss, policy_losses, reduce_policy_losses
from .kto import kto_loss
from .preference import cpo_loss, dpo_loss, orpo_loss, simpo_loss

__all__ = [
    "cosine_distillation_loss",
    "cpo_loss",
    "distillation_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "policy_losses",
    "reduce_policy_losses",
    "simpo_loss",
    "target_distribution_loss",
    "topk_distillation_loss",
]
