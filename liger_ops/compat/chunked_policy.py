"""The policy losses of `liger_kernel.chunked_loss`, and `triton_grpo_loss`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .. import losses
from ..losses.grpo import vespo_weights
from .forms import autograd_function, function, layer

UNCLIPPED = "sapo", "vespo"
TOKENS_ONLY = "cispo", *UNCLIPPED
LossAndMetrics = tuple[Tensor, tuple[Tensor, ...]]


def items_in_batch(mask: Tensor, given: Tensor | float | None) -> Tensor | float | None:
    """Without a number of tokens, the package takes that of the masks of all processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if given is not None or not distributed:
        return given
    total = mask.sum(dtype=torch.float32)
    torch.distributed.all_reduce(total)
    return total


def masked_mean(t: Tensor, mask: Tensor) -> Tensor:
    return losses.reduce_policy_losses(t.detach().to(torch.float32), mask, "bnpo")


def own_reference(reference: Tensor | None, log_probs: Tensor, beta: float) -> Tensor | None:
    """In the package, a policy without a reference model is its own: the KL estimate is 0."""
    return log_probs.detach() if reference is None and beta != 0 else reference


def check_ratio(vllm_is_ratio: Tensor | None, mask: Tensor) -> None:
    """vllm_is_ratio: (B,), (B, 1) or (B, S) for a mask (B, S)."""
    shapes = list(mask.shape[:1]), [len(mask), 1], list(mask.shape)
    if vllm_is_ratio is not None and list(vllm_is_ratio.shape) not in shapes:
        allowed = ", ".join(map(str, shapes))
        raise AssertionError(f"vllm_is_ratio must have one of the shapes {allowed} (got {list(vllm_is_ratio.shape)})")


def policy_losses(
    log_probs: Tensor, mask: Tensor, advantages: Tensor, *, vespo_k_pos: float, vespo_lambda_pos: float,
    vespo_k_neg: float, vespo_lambda_neg: float, **options: Any,
) -> Any:  # fmt: skip
    level, loss_type, delta = (options[name] for name in ("importance_sampling_level", "loss_type", "delta"))
    if level == "sequence" and loss_type in TOKENS_ONLY:
        raise ValueError(f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}.")
    if delta is not None and loss_type in TOKENS_ONLY:
        raise ValueError(f"delta (two-sided clipping) is not supported for loss_type={loss_type!r}.")
    check_ratio(options["vllm_is_ratio"], mask)
    shapes = vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg
    return losses.policy_losses(log_probs, mask, advantages, vespo_shapes=shapes, **options)


@torch.no_grad()
def get_gamma_weights(
    advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> Tensor:  # fmt: skip
    """VESPO's weights of sequences, (B, 1). advantages: (B,), log_ratio_per_token, mask: (B, S)."""
    shapes = k_pos, lambda_pos, k_neg, lambda_neg
    return vespo_weights(log_ratio_per_token, mask, advantages.unsqueeze(-1), importance_sampling_ratio, shapes)


def k3_loss_fn(log_p: Tensor, log_q: Tensor) -> Tensor:
    """An estimate of the KL divergence of q from p, of samples of q."""
    return torch.exp(log_p - log_q) - (log_p - log_q) - 1.0


def sapo_loss_fn(importance_ratio: Tensor, temperature: float) -> Tensor:
    """SAPO's gate, in the place of the ratio."""
    if temperature <= 0:
        raise ValueError(f"sapo_loss_fn: temperature must be above 0 (got {temperature})")
    return torch.sigmoid(temperature * (importance_ratio - 1)) * (4 / temperature)


def clip_coef_fn(coef: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str) -> tuple[Any, Any, Any]:
    """The clipped ratios, and masks of those below and above the limits."""
    if loss_type == "cispo":  # no lower limit, and no gradient
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    if loss_type in UNCLIPPED:
        return None, torch.zeros_like(coef, dtype=torch.bool), torch.zeros_like(coef, dtype=torch.bool)
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


def reduced(
    per_token: Tensor, mask: Tensor, loss_type: str, longest: int | None, items: Tensor | float | None
) -> Tensor:
    if loss_type == "luspo":
        return (per_token * mask.sum(1, keepdim=True)).mean()
    return losses.reduce_policy_losses(per_token, mask, loss_type, longest, items_in_batch(mask, items))


def grpo(
    input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
    bias: Tensor | None, ref_per_token_logps: Tensor | None, old_per_token_logps: Tensor | None,
    ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None, *, beta: float, loss_type: str,
    max_completion_length: int | None, temperature: float, use_ref_model: bool, delta: float | None,
    num_items_in_batch: Tensor | float | None, **options: Any,
) -> LossAndMetrics:  # fmt: skip
    mask, luspo = attention_mask, loss_type == "luspo"
    # In the package's LUSPO, padding counts too, unless every sequence has a single loss.
    ids = selected_token_ids if luspo else selected_token_ids.masked_fill(mask == 0, -100)

    def log_probs_of(hidden: Tensor, head: Tensor, of_classes: Tensor | None) -> Tensor:
        return F.fused_linear_log_probs(hidden, head, ids, of_classes, temperature=temperature).log_probs

    log_probs, ref = log_probs_of(input, weight, bias), ref_per_token_logps if use_ref_model else None
    if beta != 0 and use_ref_model and ref is None:
        if ref_input is None or ref_weight is None:
            raise AssertionError(
                "with use_ref_model, either ref_per_token_logps or ref_input and ref_weight must be given"
            )
        with torch.no_grad():
            ref = log_probs_of(ref_input, ref_weight, ref_bias)
    given = old_per_token_logps, own_reference(ref, log_probs, beta)
    old, ref = (None if t is None else t.float() if luspo else t.float().masked_fill(mask == 0, 0) for t in given)
    per_token, kl, clipped = policy_losses(
        log_probs, mask, advantages, old_log_probs=old, ref_log_probs=ref, loss_type=loss_type, beta=beta,
        delta=None if loss_type in TOKENS_ONLY else delta, **options,
    )  # fmt: skip
    loss = reduced(per_token, mask, loss_type, max_completion_length, num_items_in_batch)
    metrics = () if kl is None else (masked_mean(kl, mask),)
    return loss, (*metrics, masked_mean(clipped, mask))


def check_positive(loss: Any) -> None:
    for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
        value = getattr(loss, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


LigerFusedLinearGRPOFunction = autograd_function(__name__, "LigerFusedLinearGRPOFunction", grpo)
LigerFusedLinearGRPOLoss = layer(__name__, "LigerFusedLinearGRPOLoss", grpo, check_positive)


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """logits: (B, L + 1, V), input_ids, mask: (B, L) or longer, of which the end counts -> (B, L)."""
    steps = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - steps :]
    if mask is not None:
        ids = ids.masked_fill(mask[:, mask.shape[1] - steps :] == 0, -100)
    return F.log_probs(logits[:, :-1], ids, temperature).log_probs


def grpo_results(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None, temperature: float, beta: float, *, reduce: bool, loss_type: str,
    max_completion_length: int | None, num_items_in_batch: Tensor | float | None, phi_seq: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """logits: (B, L + 1, V), completion_ids: (B, L) -> the masked losses, KL estimates and clipped tokens, (B, L) each;
    with `reduce` the loss and the means of the others. phi_seq: VESPO's weights of sequences, if they are known."""
    mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
    ids = completion_ids.masked_fill(mask == 0, -100)
    log_probs = F.log_probs(logits[:, :-1], ids, temperature).log_probs
    given = old_logp, own_reference(ref_logp, log_probs, beta)
    old, ref = (None if t is None else t.masked_fill(mask == 0, 0) for t in given)
    found = policy_losses(
        log_probs, mask, advantages, old_log_probs=old, ref_log_probs=ref, beta=beta, loss_type=loss_type, **options
    )
    losses = found.losses
    if phi_seq is not None:
        losses = -phi_seq.reshape(-1, 1) * advantages.unsqueeze(-1) * log_probs
        losses = losses if found.kl is None else losses + beta * found.kl
    per_token, clipped = (t * mask for t in (losses, found.clipped.to(log_probs.dtype)))
    kl = None if found.kl is None else (found.kl * mask).detach()
    if not reduce:
        return per_token, kl, clipped
    longest = mask.shape[1] if max_completion_length is None else max_completion_length
    loss = reduced(per_token, mask, loss_type, longest, num_items_in_batch)
    return loss, None if kl is None else masked_mean(kl, mask), masked_mean(clipped, mask)


def grpo_of_logits(*, reduce: bool, **arguments: Any) -> Any:
    """As GrpoLossFunction, but with `reduce` the loss and a list of metrics. `inplace` is ignored: the logits are never
    overwritten."""
    loss, *metrics = grpo_results(reduce=reduce, **arguments)
    return (loss, [t for t in metrics if t is not None]) if reduce else (loss, *metrics)


def grpo_function(*, loss_type: str, reduce: bool, phi_seq: Tensor | None, **arguments: Any) -> Any:
    if loss_type == "vespo" and phi_seq is None:
        raise ValueError("GrpoLossFunction: phi_seq must be given with loss_type 'vespo' (got None)")
    known = phi_seq if loss_type == "vespo" else None
    # The shapes of weights that are known do not matter.
    shapes: Any = dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), 0.0)
    return grpo_results(loss_type=loss_type, reduce=reduce, phi_seq=known, **shapes, **arguments)


def reduce_grpo_loss(
    per_token_loss: Tensor, completion_mask: Tensor | None, loss_type: str, max_completion_length: int | None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    mask = torch.ones_like(per_token_loss) if completion_mask is None else completion_mask
    longest = per_token_loss.shape[1] if max_completion_length is None else max_completion_length
    return reduced(per_token_loss, mask, loss_type, longest, num_items_in_batch)


# Other code reaches these under names that begin with _.
_reduce_grpo_loss, _masked_mean = reduce_grpo_loss, masked_mean

triton_grpo_loss = function(__name__, "triton_grpo_loss", grpo_of_logits)
GrpoLossFunction = autograd_function(__name__, "GrpoLossFunction", grpo_function)
