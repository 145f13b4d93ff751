"""The package's base classes of losses: a subclass defines the loss of log-probabilities or logits.

As in the package, forward computes the gradients, and backward multiplies them. Unlike there, a loss of log-probabilities is
called once, with all sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad

from .. import functional as F
from ..losses._sequences import of_sequences
from ..reference._operator import widened
from . import forms
from .chunked_loss import sums_of_logits
from .chunked_policy import check_ratio

Loss = Callable[..., Any]


def forward(name: str, target: Loss) -> Any:
    """The `forward` of a base class, which a subclass calls with `cls` and `ctx`."""
    return staticmethod(forms.caller("forward", forms.signature_of(__name__, name), target))


def with_gradients(ctx: Any, tensors: tuple[Tensor | None, ...], loss: Loss) -> tuple[Tensor, tuple[Any, ...]]:
    """The loss of the tensors and what it returns besides. Saves the gradients of those tensors that require one."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with torch.enable_grad():
        value, others = loss(*leaves)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(value, wanted) if wanted else ())
    ctx.save_for_backward(*(next(found) if t is not None and t.requires_grad else None for t in leaves))
    return value.detach(), tuple(t.detach() if isinstance(t, Tensor) else t for t in others)


def multiplied(ctx: Any, upstream: Any) -> list[Tensor | None]:
    """The saved gradients times the upstream one, which subclasses pass as the tuple that they get."""
    while isinstance(upstream, tuple):
        upstream = upstream[0]
    return [None if g is None else g * upstream for g in ctx.saved_tensors]


def value_and_others(result: Any) -> tuple[Tensor, tuple[Any, ...]]:
    return (result[0], tuple(result[1:])) if isinstance(result, tuple) else (result, ())


def undefined(name: str) -> Any:
    def loss_fn(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"a subclass must define {name}")

    return staticmethod(loss_fn)


# ---- Policies


def selected_log_probs(
    input_chunk: Tensor, weight: Tensor, selected_token_ids: Tensor, bias: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """input_chunk: (B, S, n), selected_token_ids: (B, S) -> (B, S) in fp32."""
    return F.fused_linear_log_probs(input_chunk, weight, selected_token_ids, bias, temperature=temperature).log_probs


def dapo_normalizer(attention_mask: Tensor, num_items_in_batch: Tensor | float | None = None) -> Tensor:
    """The tokens of the whole batch over the number of processes, at least 1."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items_in_batch is None:
        total = attention_mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(total)
    else:
        total = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=attention_mask.device)
    return (total / (torch.distributed.get_world_size() if distributed else 1)).clamp(min=1.0)


def policy_forward(
    cls: Any, ctx: Any, input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
    advantages: Tensor, bias: Tensor | None, ref_per_token_logps: Tensor | None, old_per_token_logps: Tensor | None,
    ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None, loss_type: str,
    max_completion_length: int | None, temperature: float, use_ref_model: bool, vllm_is_ratio: Tensor | None,
    **options: Any,
) -> Any:  # fmt: skip
    ref = ref_per_token_logps if use_ref_model else None
    if use_ref_model and ref is None:
        if ref_input is None or ref_weight is None:
            raise AssertionError(
                "with use_ref_model, either ref_per_token_logps or ref_input and ref_weight must be given"
            )
        ref = selected_log_probs(ref_input, ref_weight, selected_token_ids, ref_bias, temperature)
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise AssertionError("loss_type 'dr_grpo' divides by max_completion_length, which must be given")
    check_ratio(vllm_is_ratio, attention_mask)
    if vllm_is_ratio is not None and vllm_is_ratio.dim() == 1:
        vllm_is_ratio = vllm_is_ratio.unsqueeze(-1)

    def loss(hidden: Tensor, head: Tensor, of_classes: Tensor | None) -> Any:
        value, metrics = cls.ppo_loss_fn(
            per_token_logps=selected_log_probs(hidden, head, selected_token_ids, of_classes, temperature),
            attention_mask=attention_mask, advantages=advantages, full_attention_mask=attention_mask,
            ref_per_token_logps=None if ref is None else ref.float(),
            old_per_token_logps=None if old_per_token_logps is None else old_per_token_logps.float(),
            loss_type=loss_type, max_completion_length=max_completion_length, vllm_is_ratio=vllm_is_ratio, **options,
        )  # fmt: skip
        return value, metrics

    return with_gradients(ctx, (input, weight, bias), loss)


class LigerFusedLinearPPOBase(torch.autograd.Function):
    ppo_loss_fn = undefined("ppo_loss_fn")
    chunk_forward = staticmethod(selected_log_probs)
    _compute_dapo_normalizer = staticmethod(dapo_normalizer)
    forward = forward("LigerFusedLinearPPOBase", policy_forward)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *grad_metrics: Any) -> Any:
        of_input, of_weight, of_bias = multiplied(ctx, grad_output)
        return of_input, of_weight, None, None, None, of_bias, *([None] * 21)


# ---- Preferences


def log_probs_of_sequences(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, average: bool, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Those of each token, (B, S), and of each sequence, (B,)."""
    tokens = F.fused_linear_log_probs(hidden, weight, target, bias, ignore_index=ignore_index).log_probs
    return tokens, of_sequences(tokens, target, average, ignore_index)


def preference_forward(
    cls: Any, ctx: Any, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int,
    alpha: float, beta: float, compute_nll_loss: bool, nll_target: Tensor | None, use_ref_model: bool,
    ref_input: Any, ref_weight: Any, ref_bias: Any, average_log_prob: bool, loss_kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    pairs, choice = len(target) // 2, (average_log_prob, ignore_index)
    if use_ref_model:
        with torch.no_grad():
            _, ref = log_probs_of_sequences(ref_input, ref_weight, target, ref_bias, *choice)
        loss_kwargs = {**loss_kwargs, "ref_chosen_logps": ref[:pairs], "ref_rejected_logps": ref[pairs:]}

    def loss(hidden: Tensor, head: Tensor, of_classes: Tensor | None) -> Any:
        tokens, sequences = log_probs_of_sequences(hidden, head, target, of_classes, *choice)
        chosen, rejected = sequences[:pairs], sequences[pairs:]
        nll = torch.zeros((), device=hidden.device)
        if compute_nll_loss:
            labels = (target if nll_target is None else nll_target)[:pairs]
            of_labels = tokens[:pairs]
            if nll_target is not None:
                of_labels, _ = log_probs_of_sequences(hidden[:pairs], head, labels, of_classes, *choice)
            nll = -of_labels.sum() / (labels != ignore_index).sum()
        value, others = value_and_others(cls.preference_loss_fn(chosen, rejected, target, beta=beta, **loss_kwargs))
        logits = sums_of_logits(hidden, head, of_classes) / (pairs * hidden.shape[1] * len(head))
        return alpha * nll + value, (chosen, rejected, logits[:pairs].sum(), logits[pairs:].sum(), nll, *others)

    return with_gradients(ctx, (input, weight, bias), loss)


class LigerFusedLinearPreferenceBase(torch.autograd.Function):
    preference_loss_fn = undefined("preference_loss_fn")
    forward = forward("LigerFusedLinearPreferenceBase", preference_forward)

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
        of_input, of_weight, of_bias = multiplied(ctx, grad_output)
        return of_input, of_weight, None, of_bias, None, None, None, None


def unpaired_forward(
    cls: Any, ctx: Any, input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor, bias: Tensor | None,
    ignore_index: int, use_ref_model: bool, ref_input: Any, ref_weight: Any, ref_bias: Any, average_log_prob: bool,
    loss_kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    if preference_labels is None:
        raise AssertionError("preference_labels must be given (got None)")
    choice = average_log_prob, ignore_index
    if use_ref_model:
        with torch.no_grad():
            _, ref = log_probs_of_sequences(ref_input, ref_weight, target, ref_bias, *choice)
        loss_kwargs = {**loss_kwargs, "ref_log_prob_chunk": ref}

    def loss(hidden: Tensor, head: Tensor, of_classes: Tensor | None) -> Any:
        _, sequences = log_probs_of_sequences(hidden, head, target, of_classes, *choice)
        value, others = value_and_others(cls.preference_loss_fn(sequences, preference_labels, target, **loss_kwargs))
        sums = [
            torch.where(labels, t, 0).sum()
            for t in (sequences, sums_of_logits(hidden, head, of_classes))
            for labels in (preference_labels, ~preference_labels)
        ]
        return value, (*sums, *others)

    return with_gradients(ctx, (input, weight, bias), loss)


class LigerFusedLinearUnpairedPreferenceBase(torch.autograd.Function):
    preference_loss_fn = undefined("preference_loss_fn")
    forward = forward("LigerFusedLinearUnpairedPreferenceBase", unpaired_forward)

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
        of_input, of_weight, of_bias = multiplied(ctx, grad_output)
        return of_input, of_weight, None, None, of_bias


# ---- Distillation


def distillation_forward(
    cls: Any, ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    target: Tensor, student_bias: Tensor | None, teacher_bias: Tensor | None, rows: int, ignore_index: int,
    weight_hard_loss: float, weight_soft_loss: float, beta: float, compute_ce_loss: bool, temperature: float,
    return_soft_hard_loss: bool, loss_kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The logits of `rows` rows exist at a time."""
    hard_counts = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)
    counted = (target != ignore_index).sum().clamp(min=1)
    more = max(0, len(teacher_weight) - len(student_weight))

    def loss_of(at: slice, student: Tensor, head: Tensor, of_classes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        logits, labels = linear(student, head, of_classes), target[at]
        with torch.no_grad():
            of_teacher = linear(teacher_input[at], teacher_weight, teacher_bias) / temperature
        hard = torch.zeros((), device=logits.device)
        if hard_counts:
            hard = cross_entropy(widened(logits), labels, ignore_index=ignore_index, reduction="sum") / counted
        soft = cls.distillation_loss_fn(
            pad(logits / temperature, (0, more)), of_teacher, target=labels, ignore_index=ignore_index, beta=beta,
            **loss_kwargs,
        ) / counted  # fmt: skip
        return weight_hard_loss * hard + weight_soft_loss * soft, soft, hard

    tensors = student_input, student_weight, student_bias
    wanted = [t is not None and t.requires_grad for t in tensors]
    sums: list[Any] = [None if t is None or not w else torch.zeros_like(widened(t)) for t, w in zip(tensors, wanted)]
    totals = [torch.zeros((), device=student_input.device) for _ in range(3)]
    for start in range(0, len(student_input), rows):
        at = slice(start, start + rows)
        given = student_input[at], student_weight, student_bias
        leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(given, wanted)]
        with torch.enable_grad():
            found = loss_of(at, *leaves)  # type: ignore[arg-type]
        asked = [t for t in leaves if t is not None and t.requires_grad]
        gradients = iter(torch.autograd.grad(found[0], asked) if asked else ())
        for total, w in zip((None if sums[0] is None else sums[0][at], *sums[1:]), wanted):
            if w:
                total += next(gradients)
        for total, value in zip(totals, found):
            total += value.detach()
    ctx.save_for_backward(
        *(None if t is None or total is None else total.to(t.dtype) for t, total in zip(tensors, sums))
    )
    return tuple(totals) if return_soft_hard_loss else totals[0]


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    distillation_loss_fn = undefined("distillation_loss_fn")
    forward = forward("LigerFusedLinearDistillationBase", distillation_forward)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *args: Any) -> Any:
        of_input, of_weight, of_bias = multiplied(ctx, grad_output)
        return of_input, of_weight, None, None, None, of_bias
