"""Classes whose `apply` takes the same arguments as the package's autograd functions.

Arguments that control a kernel, such as `in_place`, are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import functional as F
from .. import losses
from ..losses._chunks import in_chunks

LossAndMetrics = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]


class LigerRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> Tensor:
        return F.rms_norm(X, W, eps, offset, casting_mode)


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return F.fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


class LigerLayerNormFunction:
    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(X, W, B, eps)


class LigerSiLUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        product = F.swiglu(a if gate_multiplier == 1.0 else a * gate_multiplier, b)
        return product if down_multiplier == 1.0 else product * down_multiplier


class LigerFusedGateUpSiLUMulFunction:
    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        """y: (..., 2 n), the concatenated gate and up projections -> (..., n)."""
        return F.swiglu_packed(y)


class LigerReLUSquaredFunction:
    @staticmethod
    def apply(X: Tensor) -> Tensor:
        return F.relu_squared(X)


class LigerGELUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        return F.geglu(a, b)


class LigerMLPFunction:
    @staticmethod
    def apply(
        input: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:
        gate, up = torch.nn.functional.linear(input, gate_weight), torch.nn.functional.linear(input, up_weight)
        output = F.swiglu_linear(gate if gate_multiplier == 1.0 else gate * gate_multiplier, up, down_weight)
        return output if down_multiplier == 1.0 else output * down_multiplier


class LigerFusedMoEFunction:
    """A loop over the experts. One launch computes the gated activation of all experts."""

    @staticmethod
    def apply(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x: (T, H), gate_up_proj: (E, 2 I, H), down_proj: (E, H, I), top_k_index, top_k_weights: (T, K) -> (T, H)."""
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


class LigerTiledMLPFunction:
    """Calls a module on one chunk of the sequence at a time. Backward recomputes the activations of each chunk."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], mlp_module: Any, x: Tensor, shards: int, compute_params: Any = None
    ) -> Tensor:
        """x: (..., S, H)."""
        chunks = [checkpoint(fn, mlp_module, chunk, use_reentrant=False) for chunk in x.chunk(shards, -2)]
        return torch.cat(chunks, -2)


def apply_tiled_mlp(
    fn: Callable[[Any, Tensor], Tensor],
    mlp_module: Any,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Any = None,
) -> Tensor:
    """num_shards: the number of chunks; by default, a chunk is about as long as the hidden size."""
    shards = num_shards if num_shards is not None else math.ceil(x.shape[-2] / x.shape[-1])
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, max(1, shards), compute_params)


class LigerEmbeddingFunction:
    @staticmethod
    def apply(embeddings: Tensor, indices: Tensor) -> Tensor:
        return F.embedding(indices, embeddings)


def check_rotary_dim(rotary_dim: int, head_dim: int, columns: int) -> None:
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim must be even and in (0, head_dim={head_dim}] (got {rotary_dim})")
    if 2 * columns < rotary_dim:
        raise ValueError(f"cos and sin must have at least rotary_dim / 2 = {rotary_dim // 2} columns (got {columns})")


class LigerRopeFunction:
    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Any = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos, sin: (S, R) or (1 or B, S, R), or 4-d with one head. R is rotary_dim or half of it."""
        if cos.dim() == 4:
            heads = unsqueeze_dim if cos.shape[unsqueeze_dim] == 1 else 1
            cos, sin = cos.squeeze(heads), sin.squeeze(heads)
        if rotary_dim is not None and cos.shape[-1] != rotary_dim:
            check_rotary_dim(rotary_dim, q.shape[-1], cos.shape[-1])
            cos, sin = (torch.cat([t[..., : rotary_dim // 2]] * 2, -1) for t in (cos, sin))
        return F.rope(q, k, cos, sin)


class LigerQwen2VLMRopeFunction:
    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return F.rope(q, k, cos, sin, mrope_section=mrope_section)


class LigerLlama4RopeFunction:
    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: Any = None) -> tuple[Tensor, Tensor]:
        """q, k: (B, S, H, D), freqs_cis: (S, D / 2) or (1 or B, S, D / 2), with at least S positions."""
        freqs_cis = freqs_cis[..., : q.shape[1], :]
        q, k = F.rope_freqs_cis(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
        return q.transpose(1, 2), k.transpose(1, 2)


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


class LigerCrossEntropyFunction:
    """The loss has the dtype of the logits, as in the package. The operator computes it in fp32."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> LossAndMetrics:
        flags = return_z_loss, return_token_accuracy, return_predicted_tokens
        arguments = _input, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
        if any(flags):
            counted = target != ignore_index if reduction == "sum" else None
            loss, z_loss, accuracy, predicted = select_metrics(
                F.cross_entropy_with_metrics(*arguments), _input, counted, *flags
            )
            return loss.to(_input.dtype), z_loss, accuracy, predicted
        return F.cross_entropy(*arguments).to(_input.dtype), None, None, None


class LigerFusedLinearCrossEntropyFunction:
    """The loss is fp32, as in the package."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: Any = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: Any = None,
        ce_mode: Any = None,
        chunk_mem_const: int = 1,
    ) -> LossAndMetrics:
        flags = return_z_loss, return_token_accuracy, return_predicted_tokens
        arguments = (
            _input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
        )  # fmt: skip
        token_weight = None
        if use_token_scaling:  # multiply each token's loss by its predicted probability
            with torch.no_grad():
                found = F.fused_linear_cross_entropy_with_log_probs(
                    _input, weight, target, bias, reduction="none", ignore_index=ignore_index, softcap=softcap
                )
            token_weight = found.log_probs.exp()
        if any(flags):
            results = F.fused_linear_cross_entropy_with_metrics(*arguments, token_weight=token_weight)
            return select_metrics(results, _input, target != ignore_index if reduction == "sum" else None, *flags)
        return F.fused_linear_cross_entropy(*arguments, token_weight=token_weight), None, None, None


# Targets take no gradient, as in the package.


class LigerKLDivLossFunction:
    @staticmethod
    def apply(
        y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
    ) -> Tensor:
        return F.kl_div(y_pred, y_true.detach(), None, -100, reduction, log_target, eps)


class LigerJSDFunction:
    """The loss has the dtype of the input, and is 0 if all labels are ignored, as in the package."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: Any = None,
        jsd_mode: Any = None,
    ) -> Tensor:
        if shift_labels is None:
            return F.jsd(_input, target.detach(), None, beta, ignore_index).to(_input.dtype)
        total = F.jsd(_input, target.detach(), shift_labels, beta, ignore_index, "sum")
        return (total / (shift_labels != ignore_index).sum().clamp(min=1)).to(_input.dtype)


class LigerTVDLossFunction:
    @staticmethod
    def apply(
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        return F.tvd(p, q.detach(), shift_labels, ignore_index, reduction)


class LigerFusedCETVDFunction:
    """(cross entropy, total variation distance) of every token, in fp32. Backward recomputes the probabilities."""

    @staticmethod
    def apply(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
    ) -> tuple[Tensor, ...]:
        """student_logits, teacher_logits: (N, V), target: (N,) -> (N,), (N,)."""
        shape = student_logits.shape
        if teacher_logits.shape != shape or student_logits.dim() != 2 or target.shape != shape[:1]:
            got = ", ".join(str(list(t.shape)) for t in (student_logits, teacher_logits, target))
            raise ValueError(f"LigerFusedCETVDFunction: arguments must have shapes (N, V), (N, V) and (N,) (got {got})")

        def of_chunk(student: Tensor, teacher: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            p, q = student.softmax(-1, torch.float32), teacher.softmax(-1, torch.float32)
            ce = F.cross_entropy(student, y, reduction="none", ignore_index=ignore_index)
            return ce, F.tvd(p, q, y, ignore_index, "none").sum(-1)

        return in_chunks(of_chunk, (student_logits, teacher_logits.detach(), target), shape[-1], None)


class LigerFusedLinearJSDFunction:
    """The loss is fp32, and 0 if all labels are ignored, as in the package."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: Any = None,
        jsd_impl: Any = None,
        jsd_mode: Any = None,
    ) -> Tensor:
        return losses.distillation_loss(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, beta=jsd_beta,
            temperature=temperature, ignore_index=ignore_index,
        )[0]  # fmt: skip


class LigerFusedLinearKLDivFunction:
    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: Any = None,
    ) -> Tensor:
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


class LigerFusedLinearScaledCrossEntropyFunction:
    """(NLL, entropy, log-probabilities of the selected ids) of every token, or those of them that were requested. The
    entropy has the dtype of the input, as in the package; the others are fp32."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Any:
        """_input: (N, n), target: (N,), selected_token_ids: (K,) -> (N,), (N,), (N, K)."""
        ids = target
        if selected_token_ids is not None:
            ignored = (target == ignore_index).unsqueeze(1)
            ids = torch.cat([target.unsqueeze(1), selected_token_ids.expand(len(target), -1)], 1)
            ids = ids.masked_fill(ignored, ignore_index)
        found = F.fused_linear_log_probs(
            _input, weight, ids, temperature=temperature, ignore_index=ignore_index, entropy=return_entropy,
            entropy_grad=return_entropy,
        )  # fmt: skip
        log_probs = found.log_probs if selected_token_ids is None else found.log_probs[:, 0]
        results = [-log_probs]
        if return_entropy:
            results.append(found.entropy.to(_input.dtype))
        if selected_token_ids is not None:
            results.append(found.log_probs[:, 1:])
        return results[0] if len(results) == 1 else tuple(results)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """(NLL, entropy) of every token in fp32, or the NLL alone. Every rank gets the whole gradient of the input."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: Any,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
    ) -> Any:
        """_input: (N, n), weight: (V, n) of this rank's classes, as many as every other's, target: (N,)."""
        group: Any = dist.group.WORLD if tp_group is None else tp_group
        found = F.vocab_parallel_fused_linear_log_probs(
            _input, weight, target, group.group_name, len(weight) * group.size(), temperature=temperature,
            ignore_index=ignore_index, entropy=return_entropy, entropy_grad=return_entropy,
        )  # fmt: skip
        return (-found.log_probs, found.entropy) if return_entropy else -found.log_probs


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    given = (label_smoothing_formula, ("pytorch", "megatron")), (label_smoothing_mode, ("global", "partition"))
    for name, (value, known) in zip(("formula", "mode"), given):
        if value not in known:
            raise ValueError(f"label_smoothing_{name} must be one of {known}, got {value!r}.")


class LigerVocabParallelCEFunction:
    """The loss of every token, in fp32."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Any,
        ignore_index: int,
        label_smoothing: float,
        label_smoothing_formula: str,
        label_smoothing_mode: str,
    ) -> Tensor:
        """vocab_parallel_logits: (S, B, V) of this rank's classes, as many as every other's, target: (S, B)."""
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
        return F.vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group.group_name, classes, *options)
