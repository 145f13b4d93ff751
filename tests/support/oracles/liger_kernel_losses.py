"""As liger_kernel_calls.py: names of losses, of logits or of hidden states and a head."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as TF

from tests.support.host.solo_group import group_of_one, solo_group
from tests.support.oracles.liger_kernel_calls import Call, Case, draw, first, function, given, with_weight_first

V = 13
# Of seven rows, two of which are ignored: with the usual index, and with 3.
TARGET = torch.tensor([1, 4, -100, 0, 12, 7, -100])
OTHER = torch.tensor([3, 4, 5, 0, 12, 7, 3])


# ---- Cross entropy


def cross_entropy(
    logits: Tensor, target: Tensor, ignored: int = -100, smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, weight: list[float] | None = None,
) -> Tensor:  # fmt: skip
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept, lse = target != ignored, z.logsumexp(-1)
    of_class = torch.ones(V) if weight is None else torch.tensor(weight)
    w = of_class.to(z.dtype)[target.clamp(min=0)] * kept
    rows = w * (lse - z.gather(-1, target.clamp(min=0)[..., None])[..., 0])
    rows = (1 - smoothing) * rows + smoothing * kept * (lse - z.mean(-1)) + z_loss * kept * lse.square()
    return rows if reduction == "none" else rows.sum() / (w.sum() if reduction == "mean" else 1)


def head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ weight.mT
    return y if bias is None else y + bias


CLASS_WEIGHT = [0.5 + i % 4 / 2 for i in range(V)]
OPTIONS = dict(ignore_index=3, label_smoothing=0.1, lse_square_scale=0.05, reduction="sum", softcap=5.0)
THE_SAME = dict(ignored=3, smoothing=0.1, z_loss=0.05, reduction="sum", softcap=5.0)
IN_ORDER = (3, 0.05, 0.1, "sum", 5.0)


def of_vocabulary(formula: str, *mode: str) -> Any:
    def call(value: Any) -> Call:
        def apply(z: Tensor) -> Tensor:
            solo_group()
            return value.apply(z.view(7, 1, V), TARGET[:, None], group_of_one(), -100, 0.1, formula, *mode)[:, 0]

        return apply

    return call


def cross_entropies(n: int) -> dict[str, Case]:
    def logits(n: int) -> list[Tensor]:
        return draw((7, V), scale=3)

    def linear(n: int) -> list[Tensor]:
        return [*draw((7, n)), *draw((V, n), scale=0.5), *draw(V)]

    def weighted(value: Any) -> Call:
        return lambda z: value(torch.tensor(CLASS_WEIGHT).to(z.dtype))(z, TARGET)

    def without_bias(n: int) -> list[Tensor]:
        return linear(n)[:2]

    name = "transformers.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyLoss"
    return {
        "cross_entropy": Case(lambda z: cross_entropy(z, TARGET), logits, {
            "functional.cross_entropy": first(TARGET),
            "transformers.functional.liger_cross_entropy": function(TARGET),
            "ops.cross_entropy.LigerCrossEntropyFunction": first(TARGET, None),
            "transformers.cross_entropy.LigerCrossEntropyLoss": lambda value: lambda z: value()(z, TARGET),
        }),
        "cross_entropy with options": Case(lambda z: cross_entropy(z, OTHER, **THE_SAME), logits, {
            "functional.cross_entropy": first(OTHER, **OPTIONS),
            "transformers.functional.liger_cross_entropy": function(OTHER, **OPTIONS),
            "ops.cross_entropy.LigerCrossEntropyFunction": first(OTHER, None, *IN_ORDER),
            "transformers.cross_entropy.LigerCrossEntropyLoss": lambda value: lambda z: value(**OPTIONS)(z, OTHER),
        }),
        "cross_entropy with weights": Case(lambda z: cross_entropy(z, TARGET, weight=CLASS_WEIGHT), logits, {
            "transformers.cross_entropy.LigerCrossEntropyLoss": weighted,
        }),
        "cross_entropy of rows": Case(
            lambda z: cross_entropy(z, TARGET, smoothing=0.1, reduction="none"), logits, {
                "megatron.cross_entropy.LigerMegatronCrossEntropy": lambda value: lambda z: value(
                    label_smoothing=0.1, label_smoothing_formula="pytorch"
                )(z.view(7, 1, V), TARGET[:, None])[:, 0],
                "transformers.vocab_parallel_cross_entropy.LigerVocabParallelCrossEntropy": lambda value: lambda z: value(
                    label_smoothing=0.1
                )(z.view(7, 1, V), TARGET[:, None])[:, 0],
                "ops.vocab_parallel_cross_entropy.LigerVocabParallelCEFunction": of_vocabulary("pytorch", "global"),
            },
        ),
        "fused_linear_cross_entropy": Case(lambda x, w, b: cross_entropy(head(x, w, b), TARGET), linear, {
            "functional.fused_linear_cross_entropy": lambda value: lambda x, w, b: value(x, w, TARGET, b)[0],
            "transformers.functional.liger_fused_linear_cross_entropy":
                lambda value: lambda x, w, b: value(x, w, TARGET, b),
            "ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction":
                lambda value: lambda x, w, b: value.apply(x, w, TARGET, b)[0],
            name: with_weight_first(TARGET),
        }),
        "fused_linear_cross_entropy with options": Case(
            lambda x, w, b: cross_entropy(head(x, w, b), OTHER, **THE_SAME), linear, {
                "functional.fused_linear_cross_entropy": lambda value: lambda x, w, b: value(x, w, OTHER, b, **OPTIONS)[0],
                "transformers.functional.liger_fused_linear_cross_entropy":
                    lambda value: lambda x, w, b: value(x, w, OTHER, b, **OPTIONS),
                "ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction":
                    lambda value: lambda x, w, b: value.apply(x, w, OTHER, b, None, *IN_ORDER)[0],
                name: with_weight_first(OTHER, **OPTIONS),
            },
        ),
        "the loss of causal language models": Case(lambda x, w: cross_entropy(head(x, w), TARGET), without_bias, {
            "transformers.model.loss_utils.fixed_fused_linear_cross_entropy": function(TARGET),
            "transformers.model.loss_utils.LigerForCausalLMLoss": function(None, n, shift_labels=TARGET),
        }),
        "the loss of causal language models over items": Case(
            lambda x, w: cross_entropy(head(x, w), OTHER, 3, reduction="sum", softcap=5.0) / 9, without_bias, {
                "transformers.model.loss_utils.fixed_fused_linear_cross_entropy":
                    function(OTHER, 9, 3, final_logit_softcapping=5.0),
                "transformers.model.loss_utils.LigerForCausalLMLoss":
                    function(None, n, 9, 3, OTHER, final_logit_softcapping=5.0),
            },
        ),
        "scaled cross_entropy": Case(scaled_cross_entropy, without_bias, {
            "ops.fused_linear_scaled_cross_entropy.LigerFusedLinearScaledCrossEntropyFunction":
                function(TARGET, 0.7, -100, 1, True),
            "ops.fused_linear_scaled_cross_entropy.LigerFusedLinearScaledCrossEntropyTPFunction":
                over_a_group(0.7, -100, 1, True),
            "transformers.functional.liger_fused_linear_scaled_cross_entropy_tp": over_a_group(0.7, return_entropy=True),
        }),
    }  # fmt: skip


def scaled_cross_entropy(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    logs = (head(x, weight) / 0.7).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return cross_entropy(logs, TARGET, reduction="none"), entropy * (TARGET != -100)


def over_a_group(*more: Any, **options: Any) -> Any:
    def call(value: Any) -> Call:
        def apply(x: Tensor, w: Tensor) -> Any:
            solo_group()
            return getattr(value, "apply", value)(x, w, TARGET, group_of_one(), *more, **options)

        return apply

    return call


# ---- Divergences


def kl_div(y: Tensor, target: Tensor) -> Tensor:
    return (target * (target.log() - y)).sum() / len(y)


def jsd_rows(q_logs: Tensor, p_logs: Tensor, beta: float) -> Tensor:
    q, p = q_logs.exp(), p_logs.exp()
    mixture = (beta * p + (1 - beta) * q).log()
    return (beta * p * (p_logs - mixture) + (1 - beta) * q * (q_logs - mixture)).sum(-1)


def jsd(q_logs: Tensor, p_logs: Tensor) -> Tensor:
    return jsd_rows(q_logs, p_logs, 0.3)[TARGET != -100].mean()


def tvd(p: Tensor, q: Tensor) -> Tensor:
    return ((p - q).abs().sum(-1) / 2)[TARGET != -100].mean()


def cross_entropy_and_tvd(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    distance = (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2
    return cross_entropy(student, TARGET, reduction="none"), distance * (TARGET != -100)


def linear_jsd(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    logs = [(head(*each) / 2).log_softmax(-1) for each in ((x, w), (y, v))]
    return jsd_rows(*logs, 0.3)[TARGET != -100].mean()


def linear_kl_div(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    kept = TARGET != -100
    return kl_div((head(x, w) / 2).log_softmax(-1)[kept], p[kept])


def distillation(kind: str) -> Call:
    def formula(x: Tensor, w: Tensor, b: Tensor, y: Tensor, v: Tensor, c: Tensor) -> Tensor:
        student, teacher = head(x, w, b), head(y, v, c)
        if kind == "JSD":
            soft = jsd_rows((student / 2).log_softmax(-1), (teacher / 2).log_softmax(-1), 0.3)
        else:
            lengths = student.norm(dim=-1) * teacher.norm(dim=-1)
            soft = 0.3 * (1 - (student * teacher).sum(-1) / lengths)
        return 0.4 * cross_entropy(student, TARGET) + 0.6 * soft[TARGET != -100].mean()

    return formula


def divergences(n: int) -> dict[str, Case]:
    def probabilities(n: int) -> list[Tensor]:
        a, b = (t.softmax(-1) for t in given((7, n), (7, n)))
        return [a.requires_grad_(), b]

    def logs(n: int) -> list[Tensor]:
        a, b = (t.log_softmax(-1) for t in given((7, n), (7, n)))
        return [a.requires_grad_(), b]

    def log_and_probabilities(n: int) -> list[Tensor]:
        a, b = logs(n)
        return [a, b.exp()]

    def two_heads(n: int) -> list[Tensor]:
        return [*draw((7, n)), *draw((V, n), scale=0.5), *given((7, 5), (V, 5))]

    def two_biased_heads(n: int) -> list[Tensor]:
        return [*draw((7, n)), *draw((V, n), scale=0.5), *draw(V), *given((7, 5), (V, 5), V)]

    def distilling(kind: str, short: str) -> Case:
        options = (0.4, 0.6, 0.3, -100, 2.0)

        def of_function(value: Any) -> Call:
            return lambda x, w, b, y, v, c: getattr(value, "apply", value)(x, w, y, v, TARGET, b, c, *options)

        def of_module(value: Any) -> Call:
            return lambda x, w, b, y, v, c: value(*options)(x, w, y, v, TARGET, b, c)

        file = f"chunked_loss.{'cosine_similarity' if short == 'cosine' else 'jsd'}_loss.LigerFusedLinear{kind}"
        return Case(distillation(kind), two_biased_heads, {
            f"{file}Function": of_function, f"{file}Loss": of_module,
            f"chunked_loss.functional.liger_fused_linear_{short}": of_function,
        })  # fmt: skip

    return {
        "kl_div": Case(kl_div, log_and_probabilities, {
            "functional.kl_div": function(),
            "transformers.functional.liger_kl_div": function(reduction="batchmean"),
            "ops.kl_div.LigerKLDivLossFunction": function("batchmean", False),
            "transformers.kl_div.LigerKLDIVLoss": lambda value: value(reduction="batchmean"),
        }),
        "kl_div of logarithms": Case(lambda y, t: kl_div(y, t.exp()) * len(y), logs, {
            "functional.kl_div": function("sum", True),
            "transformers.functional.liger_kl_div": function(reduction="sum", log_target=True),
            "ops.kl_div.LigerKLDivLossFunction": function("sum", True),
            "transformers.kl_div.LigerKLDIVLoss": lambda value: value(reduction="sum", log_target=True),
        }),
        "jsd": Case(jsd, logs, {
            "functional.jsd": function(TARGET, 0.3),
            "transformers.functional.liger_jsd": function(TARGET, 0.3),
            "ops.jsd.LigerJSDFunction": function(TARGET, 0.3),
            "transformers.jsd.LigerJSD": lambda value: lambda q, p: value(0.3)(q, p, TARGET),
        }),
        "tvd": Case(tvd, probabilities, {
            "transformers.functional.liger_tvd": function(TARGET, "batchmean"),
            "ops.tvd.LigerTVDLossFunction": function(TARGET, "batchmean"),
            "transformers.tvd.LigerTVDLoss": lambda value: lambda p, q: value("batchmean")(p, q, TARGET),
        }),
        "cross entropy and tvd": Case(cross_entropy_and_tvd, lambda n: [*draw((7, V)), *given((7, V))], {
            "ops.fused_ce_tvd.LigerFusedCETVDFunction": function(TARGET),
            "transformers.fused_ce_tvd.LigerFusedCETVDLoss": lambda value: lambda a, b: value()(a, b, TARGET),
        }),
        "fused_linear_jsd": Case(linear_jsd, two_heads, {
            "functional.fused_linear_jsd": function(TARGET, 0.3, -100, 2.0),
            "transformers.functional.liger_fused_linear_jsd": function(TARGET, 0.3, -100, 2.0),
            "ops.fused_linear_jsd.LigerFusedLinearJSDFunction": function(TARGET, 0.3, -100, 2.0),
            "transformers.fused_linear_jsd.LigerFusedLinearJSD":
                lambda value: lambda *t: value(0.3, temperature=2.0)(*t, TARGET),
        }),
        "fused_linear_kl_div": Case(
            linear_kl_div, lambda n: [*draw((7, n)), *draw((V, n), scale=0.5), given((7, V))[0].softmax(-1)], {
                "ops.fused_linear_kl_div.LigerFusedLinearKLDivFunction": function(TARGET, "batchmean", -100, 2.0),
                "transformers.functional.liger_fused_linear_kl_div": function(TARGET, "batchmean", -100, 2.0),
                "transformers.fused_linear_kl_div.LigerFusedLinearKLDivLoss":
                    lambda value: lambda *t: value("batchmean", temperature=2.0)(*t, TARGET),
            },
        ),
        "distillation by jsd": distilling("JSD", "jsd"),
        "distillation by cosine": distilling("CosineSimilarity", "cosine"),
    }  # fmt: skip


# ---- Preferences and policies

# (B, S), of which the first two sequences are preferred.
LABELS = torch.tensor([[1, 4, -100], [0, 12, 7], [5, 5, 2], [-100, 3, 9]])
LIKED = torch.tensor([True, False, False, True])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([0.5, -1.0, 2.0, -0.25])
IDS = LABELS.clamp(min=0)


def of_ids(logs: Tensor, ids: Tensor) -> Tensor:
    return logs.gather(-1, ids.clamp(min=0)[..., None])[..., 0]


def of_sequences(logits: Tensor, average: bool) -> Tensor:
    kept = LABELS != -100
    sums = (of_ids(logits.log_softmax(-1), LABELS) * kept).sum(-1)
    return sums / kept.sum(-1) if average else sums


def log_sigmoid(x: Tensor) -> Tensor:
    return -TF.softplus(-x)


def smoothed(x: Tensor) -> Tensor:
    return (0.8 * -log_sigmoid(x) + 0.2 * -log_sigmoid(-x)).mean()


def preference(kind: str) -> Call:
    def formula(x: Tensor, w: Tensor, b: Tensor, y: Tensor, v: Tensor, c: Tensor) -> Tensor:
        logits = head(x, w, b)
        sums = of_sequences(logits, kind in ("SimPO", "ORPO"))
        chosen, rejected = sums.chunk(2)
        nll = cross_entropy(logits[:2].flatten(0, 1), LABELS[:2].flatten())
        if kind == "CPO":
            return smoothed(0.3 * (chosen - rejected)) + 0.7 * nll
        if kind == "SimPO":
            return smoothed(0.3 * (chosen - rejected) - 0.4) + 0.7 * nll
        if kind == "ORPO":
            odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            return -0.3 * log_sigmoid(odds).mean() + nll
        gained = sums - of_sequences(head(y, v, c), False)
        if kind == "KTO":
            return (1 - torch.sigmoid(torch.where(LIKED, 1, -1) * 0.3 * (gained - 0.2))).mean()
        return -log_sigmoid(0.3 * (gained[:2] - gained[2:])).mean() + 0.7 * nll

    return formula


def policy(logits: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """DAPO's loss, with a penalty."""
    logs = of_ids(logits.log_softmax(-1), IDS)
    ratio, a, gap = (logs - old).exp(), ADVANTAGES.to(logs.dtype)[:, None], ref - logs
    losses = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.3) * a) + 0.1 * (gap.exp() - gap - 1)
    return (losses * MASK).sum() / MASK.sum()


PREFERENCES = {
    "CPO": dict(beta=0.3, alpha=0.7, label_smoothing=0.2, compute_nll_loss=True),
    "SimPO": dict(beta=0.3, alpha=0.7, label_smoothing=0.2, compute_nll_loss=True, gamma=0.4),
    "ORPO": dict(beta=0.3, compute_nll_loss=True),
    "DPO": dict(beta=0.3, alpha=0.7, compute_nll_loss=True, use_ref_model=True),
    "KTO": dict(beta=0.3, use_ref_model=True),
}


def of_preference(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    def tail(b: Tensor, *reference: Tensor) -> dict[str, Tensor]:
        names = dict(zip(("ref_input", "ref_weight", "ref_bias"), reference)) if kind in ("DPO", "KTO") else {}
        more = dict(preference_labels=LIKED, kl=torch.tensor(0.2)) if kind == "KTO" else {}
        return dict(bias=b, **names, **more)

    def of_module(value: Any) -> Call:
        def call(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
            return value(**options)(*((x, w) if kind == "KTO" else (w, x)), LABELS, **tail(*others))[0]

        return call

    def of_function(value: Any) -> Call:
        return lambda x, w, *others: value(x, w, LABELS, **tail(*others), **options)[0]

    def of_autograd(value: Any) -> Call:
        defaults = [(p.name, p.default) for p in inspect.signature(value.apply).parameters.values()][3:]

        def call(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
            known = {**options, **tail(*others)}
            return value.apply(x, w, LABELS, *(known.get(name, default) for name, default in defaults))[0]

        return call

    file = f"chunked_loss.{kind.lower()}_loss.LigerFusedLinear{kind}"
    return {
        f"{file}Loss": of_module, f"{file}Function": of_autograd,
        f"chunked_loss.functional.liger_fused_linear_{kind.lower()}": of_function,
    }  # fmt: skip


def preferences(n: int) -> dict[str, Case]:
    def heads(n: int) -> list[Tensor]:
        return [*draw((4, 3, n)), *draw((V, n), scale=0.5), *draw(V), *given((4, 3, 5), (V, 5), V)]

    def policies(n: int) -> list[Tensor]:
        """Old and reference log-probabilities are multiples of 1/8. No ratio is near a limit, where the loss has a corner."""
        return [*draw((4, 3, V)), *((torch.randn(4, 3) * 4).round() / 8 - 2.5 for _ in range(2))]

    def of_logits(*more: Any, **options: Any) -> Any:
        def call(value: Any) -> Call:
            def apply(z: Tensor, old: Tensor, ref: Tensor) -> Tensor:
                padded = torch.cat([z, z[:, :1].detach()], 1)
                arguments = (padded, old.float(), ref.float(), IDS, ADVANTAGES, MASK)
                return getattr(value, "apply", value)(*arguments, *more, **options)[0]

            return apply

        return call

    def linear_policies(n: int) -> list[Tensor]:
        return [*draw((4, 3, n)), *draw((V, n), scale=0.5), *draw(V), *policies(n)[1:]]

    limits = dict(beta=0.1, epsilon_low=0.2, epsilon_high=0.3)

    def of_head(value: Any) -> Call:
        def apply(x: Tensor, w: Tensor, b: Tensor, old: Tensor, ref: Tensor) -> Tensor:
            if value.__name__.endswith("Loss"):
                loss = value(**limits, use_ref_model=True)
                return loss(x, w, IDS, MASK, ADVANTAGES, b, ref.float(), old.float())[0]
            if value.__name__.endswith("Function"):
                return value.apply(x, w, IDS, MASK, ADVANTAGES, b, ref.float(), old.float(), None, None, None,
                                   *limits.values())[0]  # fmt: skip
            return value(x, w, IDS, MASK, ADVANTAGES, b, ref.float(), old.float(), **limits)[0]

        return apply

    return {
        **{kind: Case(preference(kind), heads, of_preference(kind, given)) for kind, given in PREFERENCES.items()},
        "GRPO of logits": Case(policy, policies, {
            "transformers.grpo_loss.triton_grpo_loss": of_logits(1.0, 0.1, 0.2, 0.3, reduce=True),
            "ops.grpo_loss.GrpoLossFunction": of_logits(1.0, 0.1, 0.2, 0.3, False, "dapo"),
        }),
        "GRPO": Case(lambda x, w, b, *others: policy(head(x, w, b), *others), linear_policies, dict.fromkeys((
            "chunked_loss.grpo_loss.LigerFusedLinearGRPOLoss", "chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction",
            "chunked_loss.functional.liger_fused_linear_grpo",
        ), of_head)),
    }  # fmt: skip
