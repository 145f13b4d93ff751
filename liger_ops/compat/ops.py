"""Classes whose `apply` takes the same arguments as the package's autograd functions, and the functions that they call.

Arguments that control a kernel, such as `in_place`, are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import functional as F
from .. import losses
from ..losses._chunks import in_chunks
from . import forms

LossAndMetrics = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]
autograd_function = partial(forms.autograd_function, __name__)

# ---- Gated activations, experts and rotary position embedding


def swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    product = F.swiglu(gate if gate_multiplier == 1.0 else gate * gate_multiplier, up)
    return product if down_multiplier == 1.0 else product * down_multiplier


def mlp(
    input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    gate, up = torch.nn.functional.linear(input, gate_weight), torch.nn.functional.linear(input, up_weight)
    output = F.swiglu_linear(gate if gate_multiplier == 1.0 else gate * gate_multiplier, up, down_weight)
    return output if down_multiplier == 1.0 else output * down_multiplier


def fused_moe(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """x: (T, H), gate_up_proj: (E, 2 I, H), down_proj: (E, H, I), top_k_index, top_k_weights: (T, K) -> (T, H).

    A loop over the experts. One launch computes the gated activation of all experts.
    """
    tokens, k = top_k_index.shape
    # Sort the pairs of a token and one of its experts by expert.
    order = top_k_index.flatten().argsort(stable=True)
    counts = top_k_index.flatten().bincount(minlength=len(gate_up_proj)).tolist()
    if len(counts) > len(gate_up_proj):
        limit = f"the number of experts, {len(gate_up_proj)} (got {len(counts) - 1})"
        raise IndexError(f"LigerFusedMoEFunction: top_k_index must be below {limit}")
    rows = x[order // k].split(counts)
    # unbind stacks the experts' gradients once in backward; indexing would make a full gradient per expert.
    linear = torch.nn.functional.linear
    gate_up = [linear(r, w) for r, w in zip(rows, gate_up_proj.unbind(), strict=True)]
    hidden = F.swiglu_packed(torch.cat(gate_up)).split(counts)
    outputs = torch.cat([linear(h, w) for h, w in zip(hidden, down_proj.unbind(), strict=True)])
    # Gather back to the order of the tokens, which keeps the order of additions the same in every run.
    outputs = outputs[order.argsort()].view(tokens, k, x.shape[-1])
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def tiled_mlp(fn: Callable[[Any, Tensor], Tensor], mlp_module: Any, x: Tensor, shards: int) -> Tensor:
    """Calls a module on one chunk of the sequence (..., S, H) at a time. Backward recomputes each chunk."""
    chunks = [checkpoint(fn, mlp_module, chunk, use_reentrant=False) for chunk in x.chunk(shards, -2)]
    return torch.cat(chunks, -2)


def apply_tiled_mlp(
    fn: Callable[[Any, Tensor], Tensor], mlp_module: Any, x: Tensor, num_shards: int | None = None,
    compute_params: Any = None,
) -> Tensor:  # fmt: skip
    """num_shards: the number of chunks; by default, a chunk is about as long as the hidden size."""
    shards = num_shards if num_shards is not None else math.ceil(x.shape[-2] / x.shape[-1])
    return tiled_mlp(fn, mlp_module, x, max(1, shards))


def check_rotary_dim(rotary_dim: int, head_dim: int, columns: int) -> None:
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim must be even and in (0, head_dim={head_dim}] (got {rotary_dim})")
    if 2 * columns < rotary_dim:
        raise ValueError(f"cos and sin must have at least rotary_dim / 2 = {rotary_dim // 2} columns (got {columns})")


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, rotary_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos, sin: (S, R) or (1 or B, S, R), or 4-d with one head. R is rotary_dim or half of it. By default, rotary_dim is
    R, or the size of the heads if that is less; with an odd size, the last column does not rotate."""
    if cos.dim() == 4:
        heads = next((d for d in (unsqueeze_dim, 1, 2) if cos.shape[d] == 1), 1)
        cos, sin = cos.squeeze(heads), sin.squeeze(heads)
    if rotary_dim is None:
        rotary_dim = 2 * (min(cos.shape[-1], q.shape[-1]) // 2)
    else:
        check_rotary_dim(rotary_dim, q.shape[-1], cos.shape[-1])
    if cos.shape[-1] != rotary_dim:
        cos, sin = (torch.cat([t[..., : rotary_dim // 2]] * 2, -1) for t in (cos, sin))
    return F.rope(q, k, cos, sin)


def llama4_rope(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: (B, S, H, D), freqs_cis: (S, D / 2) or (1 or B, S, D / 2), with at least S positions."""
    freqs_cis = freqs_cis[..., : q.shape[1], :]
    q, k = F.rope_freqs_cis(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
    return q.transpose(1, 2), k.transpose(1, 2)


# ---- Cross entropy


def select_metrics(
    results: F.CrossEntropyMetrics, input: Tensor, counted: Tensor | None, *flags: bool
) -> LossAndMetrics:
    """The loss and the requested metrics, with the z-loss in the dtype of the input and the accuracy in fp32.

    counted: with reduction="sum", a mask of the targets that count. The package's accuracy is then still a mean; the
    operator's is the number of hits.
    """
    accuracy = results.token_accuracy if counted is None else results.token_accuracy / counted.sum()
    metrics = results.z_loss.to(input.dtype), accuracy, results.predicted_tokens
    z_loss, token_accuracy, predicted = (m if flag else None for m, flag in zip(metrics, flags))
    return results.loss, z_loss, token_accuracy, predicted


def cross_entropy(
    input: Tensor, target: Tensor, *, return_z_loss: bool, return_token_accuracy: bool, return_predicted_tokens: bool,
    **options: Any,
) -> LossAndMetrics:  # fmt: skip
    """The loss has the dtype of the logits, as in the package. The operator computes it in fp32."""
    flags = return_z_loss, return_token_accuracy, return_predicted_tokens
    if any(flags):
        counted = target != options["ignore_index"] if options["reduction"] == "sum" else None
        results = F.cross_entropy_with_metrics(input, target, **options)
        loss, z_loss, accuracy, predicted = select_metrics(results, input, counted, *flags)
        return loss.to(input.dtype), z_loss, accuracy, predicted
    return F.cross_entropy(input, target, **options).to(input.dtype), None, None, None


def fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, return_z_loss: bool,
    use_token_scaling: bool, return_token_accuracy: bool, return_predicted_tokens: bool, **options: Any,
) -> LossAndMetrics:  # fmt: skip
    """The loss is fp32, as in the package."""
    flags = return_z_loss, return_token_accuracy, return_predicted_tokens
    ignore_index = options["ignore_index"]
    if use_token_scaling:  # multiply each token's loss by its predicted probability
        with torch.no_grad():
            found = F.fused_linear_cross_entropy_with_log_probs(
                input, weight, target, bias, reduction="none", ignore_index=ignore_index, softcap=options["softcap"]
            )
        options["token_weight"] = found.log_probs.exp()
    if any(flags):
        results = F.fused_linear_cross_entropy_with_metrics(input, weight, target, bias, **options)
        return select_metrics(results, input, target != ignore_index if options["reduction"] == "sum" else None, *flags)
    return F.fused_linear_cross_entropy(input, weight, target, bias, **options), None, None, None


# ---- Divergences. Targets take no gradient, as in the package.


def kl_div(input: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float) -> Tensor:
    return F.kl_div(input, target.detach(), None, -100, reduction, log_target, eps)


def jsd(input: Tensor, target: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int) -> Tensor:
    """The loss has the dtype of the input, and is 0 if all labels are ignored, as in the package."""
    if shift_labels is None:
        return F.jsd(input, target.detach(), None, beta, ignore_index).to(input.dtype)
    total = F.jsd(input, target.detach(), shift_labels, beta, ignore_index, "sum")
    return (total / (shift_labels != ignore_index).sum().clamp(min=1)).to(input.dtype)


def tvd(input: Tensor, target: Tensor, shift_labels: Tensor | None, reduction: str, ignore_index: int) -> Tensor:
    return F.tvd(input, target.detach(), shift_labels, ignore_index, reduction)


def fused_ce_tvd(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, ...]:
    """(cross entropy, total variation distance) of every token, in fp32. Backward recomputes the probabilities.

    student_logits, teacher_logits: (N, V), target: (N,) -> (N,), (N,).
    """
    shape = student_logits.shape
    if teacher_logits.shape != shape or student_logits.dim() != 2 or target.shape != shape[:1]:
        got = ", ".join(str(list(t.shape)) for t in (student_logits, teacher_logits, target))
        raise ValueError(f"LigerFusedCETVDFunction: arguments must have shapes (N, V), (N, V) and (N,) (got {got})")

    def of_chunk(student: Tensor, teacher: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p, q = student.softmax(-1, torch.float32), teacher.softmax(-1, torch.float32)
        ce = F.cross_entropy(student, y, reduction="none", ignore_index=ignore_index)
        return ce, F.tvd(p, q, y, ignore_index, "none").sum(-1)

    return in_chunks(of_chunk, (student_logits, teacher_logits.detach(), target), shape[-1], None)


def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None, **options: Any,
) -> Tensor:  # fmt: skip
    """The loss is fp32, and 0 if all labels are ignored, as in the package."""
    return losses.distillation_loss(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, **options
    )[0]


def fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None, *, reduction: str,
    ignore_index: int, temperature: float, eps: float,
) -> Tensor:  # fmt: skip
    """target: (N, V) probabilities. The mean is over the rows that count, and 0 if there are none."""
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(f"reduction must be one of ('batchmean', 'mean', 'sum'), got {reduction!r}")
    mask = None if shift_labels is None else shift_labels != ignore_index
    total = losses.target_distribution_loss(
        student_input, student_weight, target, temperature=temperature, mask=mask, eps=eps
    ).sum()
    if reduction == "sum":
        return total
    rows = len(target) if mask is None else mask.sum().clamp(min=1)
    return total / (rows * (target.shape[-1] if reduction == "mean" else 1))


# ---- Log-probabilities, and logits that are split over ranks


def fused_linear_scaled_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, *, temperature: float, ignore_index: int, return_entropy: bool,
    selected_token_ids: Tensor | None,
) -> Any:  # fmt: skip
    """(NLL, entropy, log-probabilities of the selected ids) of every token, or those of them that were requested. The
    entropy has the dtype of the input, as in the package; the others are fp32.

    input: (N, n), target: (N,), selected_token_ids: (K,) -> (N,), (N,), (N, K).
    """
    ids = target
    if selected_token_ids is not None:
        ignored = (target == ignore_index).unsqueeze(1)
        ids = torch.cat([target.unsqueeze(1), selected_token_ids.expand(len(target), -1)], 1)
        ids = ids.masked_fill(ignored, ignore_index)
    found = F.fused_linear_log_probs(
        input, weight, ids, temperature=temperature, ignore_index=ignore_index, entropy=return_entropy,
        entropy_grad=return_entropy,
    )  # fmt: skip
    log_probs = found.log_probs if selected_token_ids is None else found.log_probs[:, 0]
    results = [-log_probs]
    if return_entropy:
        results.append(found.entropy.to(input.dtype))
    if selected_token_ids is not None:
        results.append(found.log_probs[:, 1:])
    return results[0] if len(results) == 1 else tuple(results)


def fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, *, return_entropy: bool, **options: Any
) -> Any:
    """(NLL, entropy) of every token in fp32, or the NLL alone. Every rank gets the whole gradient of the input.

    input: (N, n), weight: (V, n) of this rank's classes, as many as every other's, target: (N,).
    """
    group: Any = dist.group.WORLD if tp_group is None else tp_group
    found = F.fused_linear_log_probs(
        input, weight, target, entropy=return_entropy, entropy_grad=return_entropy, group=group.group_name,
        classes=len(weight) * group.size(), **options,
    )  # fmt: skip
    return (-found.log_probs, found.entropy) if return_entropy else -found.log_probs


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    given = (label_smoothing_formula, ("pytorch", "megatron")), (label_smoothing_mode, ("global", "partition"))
    for name, (value, known) in zip(("formula", "mode"), given):
        if value not in known:
            raise ValueError(f"label_smoothing_{name} must be one of {known}, got {value!r}.")


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int, label_smoothing: float,
    label_smoothing_formula: str, label_smoothing_mode: str, reduction: str = "none",
) -> Tensor:  # fmt: skip
    """The loss of every token, in fp32: the package knows no other reduction.

    vocab_parallel_logits: (S, B, V) of this rank's classes, as many as every other's, target: (S, B).
    """
    if vocab_parallel_logits.dim() != 3:
        raise ValueError(f"vocab_parallel_logits must be 3-D (got shape {list(vocab_parallel_logits.shape)})")
    ranks = 1 if tp_group is None else tp_group.size()
    if label_smoothing and label_smoothing_mode == "partition" and ranks > 1:
        raise ValueError("label_smoothing_mode must be global over several ranks (got partition)")
    classes = vocab_parallel_logits.shape[-1] * ranks
    if label_smoothing_formula == "megatron":  # the true class takes no part of the smoothing
        label_smoothing = label_smoothing * classes / (classes - 1)
    options = None, "none", ignore_index, label_smoothing
    if ranks == 1:
        return F.cross_entropy(vocab_parallel_logits, target, *options)
    return F.cross_entropy(vocab_parallel_logits, target, *options, group=tp_group.group_name, classes=classes)


# ---- The package's autograd functions

LigerRMSNormFunction = autograd_function("LigerRMSNormFunction", F.rms_norm)
LigerFusedAddRMSNormFunction = autograd_function("LigerFusedAddRMSNormFunction", F.fused_add_rms_norm)
LigerLayerNormFunction = autograd_function("LigerLayerNormFunction", F.layer_norm)
LigerSiLUMulFunction = autograd_function("LigerSiLUMulFunction", swiglu)
LigerFusedGateUpSiLUMulFunction = autograd_function("LigerFusedGateUpSiLUMulFunction", F.swiglu_packed)
LigerReLUSquaredFunction = autograd_function("LigerReLUSquaredFunction", F.relu_squared)
LigerGELUMulFunction = autograd_function("LigerGELUMulFunction", F.geglu)
LigerMLPFunction = autograd_function("LigerMLPFunction", mlp)
LigerFusedMoEFunction = autograd_function("LigerFusedMoEFunction", fused_moe)
LigerTiledMLPFunction = autograd_function("LigerTiledMLPFunction", tiled_mlp)
LigerEmbeddingFunction = autograd_function("LigerEmbeddingFunction", F.embedding)
LigerRopeFunction = autograd_function("LigerRopeFunction", rope)
LigerQwen2VLMRopeFunction = autograd_function("LigerQwen2VLMRopeFunction", F.rope)
LigerLlama4RopeFunction = autograd_function("LigerLlama4RopeFunction", llama4_rope)
LigerCrossEntropyFunction = autograd_function("LigerCrossEntropyFunction", cross_entropy)
LigerFusedLinearCrossEntropyFunction = autograd_function(
    "LigerFusedLinearCrossEntropyFunction", fused_linear_cross_entropy
)
LigerKLDivLossFunction = autograd_function("LigerKLDivLossFunction", kl_div)
LigerJSDFunction = autograd_function("LigerJSDFunction", jsd)
LigerTVDLossFunction = autograd_function("LigerTVDLossFunction", tvd)
LigerFusedCETVDFunction = autograd_function("LigerFusedCETVDFunction", fused_ce_tvd)
LigerFusedLinearJSDFunction = autograd_function("LigerFusedLinearJSDFunction", fused_linear_jsd)
LigerFusedLinearKLDivFunction = autograd_function("LigerFusedLinearKLDivFunction", fused_linear_kl_div)
LigerFusedLinearScaledCrossEntropyFunction = autograd_function(
    "LigerFusedLinearScaledCrossEntropyFunction", fused_linear_scaled_cross_entropy
)
LigerFusedLinearScaledCrossEntropyTPFunction = autograd_function(
    "LigerFusedLinearScaledCrossEntropyTPFunction", fused_linear_scaled_cross_entropy_tp
)
LigerVocabParallelCEFunction = autograd_function("LigerVocabParallelCEFunction", vocab_parallel_cross_entropy)
