"""Wrong arguments of the losses are errors that name the loss, the argument, the rule and the value."""

import math
import re

import pytest
import torch

from liger_ops import losses
from tests.support.families.post_training import CLASSES, B, S, model, targets

POSITIVE, NOT_NEGATIVE = "be positive and finite", "be finite and not negative"


def heads():
    m, teacher = model(B, S), model(B, S, width=12, frozen=True)
    return m, teacher, targets(B, S)


def preference(name, **options):
    m, _, target = heads()
    given = dict(hidden=m.hidden, weight=m.weight, target=target, bias=m.bias)
    given |= {"desirable": torch.arange(B) < 2} if name == "kto_loss" else {}
    return getattr(losses, name)(**given | options)


def policy(name="grpo_loss", **options):
    m, _, target = heads()
    given = dict(hidden=m.hidden, weight=m.weight, target=target.clamp(min=0), bias=m.bias)
    return losses.grpo_loss(**given | dict(mask=torch.ones(B, S), advantages=torch.randn(B)) | options)


def distillation(name, **options):
    m, teacher, target = heads()
    given = dict(hidden=m.hidden, weight=m.weight)
    if name == "topk_distillation_loss":
        ids, logs = torch.zeros(B, S, 1, dtype=torch.long), torch.full((B, S, 1), -1.0)
        given |= dict(teacher_ids=ids, teacher_log_probs=logs, target=target)
    elif name == "target_distribution_loss":
        given |= dict(probabilities=torch.full((B, S, CLASSES), 1 / CLASSES))
    else:
        given |= dict(teacher_hidden=teacher.hidden, teacher_weight=teacher.weight, target=target)
    return getattr(losses, name)(**given | options)


def reference(**replaced):
    _, teacher, _ = heads()
    return {"ref_hidden": teacher.hidden, "ref_weight": teacher.weight, "ref_bias": teacher.bias} | replaced


NONE = "None"
CASES = [
    *[(preference, name, {"beta": v}, "beta", POSITIVE, v)
      for name in ("dpo_loss", "cpo_loss", "simpo_loss", "kto_loss") for v in (-1, 0.0, math.nan, math.inf)],
    (preference, "orpo_loss", {"beta": -0.1}, "beta", NOT_NEGATIVE, -0.1),
    (policy, "grpo_loss", {"beta": -0.1}, "beta", NOT_NEGATIVE, -0.1),
    *[(distillation, name, {"beta": 1.5}, "beta", "be between 0 and 1", 1.5)
      for name in ("distillation_loss", "topk_distillation_loss")],
    *[(preference, name, {"nll_weight": -1.0}, "nll_weight", NOT_NEGATIVE, -1.0)
      for name in ("dpo_loss", "cpo_loss", "simpo_loss", "orpo_loss")],
    *[(preference, name, {"label_smoothing": 0.6}, "label_smoothing", "be between 0 and 0.5", 0.6)
      for name in ("dpo_loss", "cpo_loss", "simpo_loss")],
    (preference, "dpo_loss", {"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing",
     "be 0 with loss_type hinge", 0.1),
    (preference, "dpo_loss", {"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau", POSITIVE, 0.0),
    (preference, "cpo_loss", {"gamma": math.nan}, "gamma", NOT_NEGATIVE, math.nan),
    (preference, "simpo_loss", {"gamma": -0.5}, "gamma", NOT_NEGATIVE, -0.5),
    (preference, "kto_loss", {"desirable_weight": -1.0}, "desirable_weight", NOT_NEGATIVE, -1.0),
    (preference, "kto_loss", {"undesirable_weight": math.inf}, "undesirable_weight", NOT_NEGATIVE, math.inf),
    # References
    (policy, "grpo_loss", {"beta": 10.0}, "ref_log_probs or ref_hidden", "be given with beta 10.0", NONE),
    *[(call, name, reference(**{missing: None}), missing, f"be given with {given}", NONE)
      for call, name in ((preference, "dpo_loss"), (preference, "kto_loss"), (policy, "grpo_loss"))
      for missing, given in (("ref_hidden", "ref_weight"), ("ref_weight", "ref_hidden"))],
    *[(call, name, {"ref_bias": torch.zeros(CLASSES)}, "ref_hidden", "be given with ref_bias", NONE)
      for call, name in ((preference, "dpo_loss"), (preference, "kto_loss"), (policy, "grpo_loss"))],
    (preference, "dpo_loss", reference(ref_log_probs=torch.zeros(B)), "ref_hidden", "be None with ref_log_probs",
     "a Tensor"),
    # GRPO
    (policy, "grpo_loss", {"epsilon_low": 1.2}, "epsilon_low", "be between 0 and 1", 1.2),
    (policy, "grpo_loss", {"epsilon_high": -0.2}, "epsilon_high", "not be negative", -0.2),
    (policy, "grpo_loss", {"delta": 0.0}, "delta", POSITIVE, 0.0),
    (policy, "grpo_loss", {"entropy_weight": math.nan}, "entropy_weight", "be finite", math.nan),
    (policy, "grpo_loss", {"sapo_temperature_pos": 0.0}, "sapo_temperature_pos", POSITIVE, 0.0),
    (policy, "grpo_loss", {"sapo_temperature_neg": -1.0}, "sapo_temperature_neg", POSITIVE, -1.0),
    (policy, "grpo_loss", {"vespo_shapes": (1.0, 2.0)}, "vespo_shapes", "be four finite numbers that are not negative",
     (1.0, 2.0)),
    (policy, "grpo_loss", {"loss_type": "dr_grpo", "max_completion_length": 0}, "max_completion_length", POSITIVE, 0),
    (policy, "grpo_loss", {"num_items_in_batch": -3}, "num_items_in_batch", NOT_NEGATIVE, -3),
    # Distillation
    *[(distillation, name, {option: -1.0}, option, NOT_NEGATIVE, -1.0)
      for name in ("distillation_loss", "topk_distillation_loss", "cosine_distillation_loss")
      for option in ("soft_weight", "hard_weight")],
    *[(distillation, name, {"temperature": 0.0}, "temperature", POSITIVE, 0.0)
      for name in ("distillation_loss", "topk_distillation_loss", "target_distribution_loss")],
    *[(distillation, name, {"num_items_in_batch": -1}, "num_items_in_batch", NOT_NEGATIVE, -1)
      for name in ("distillation_loss", "topk_distillation_loss")],
    *[(distillation, name, {"memory_budget": -1}, "memory_budget", POSITIVE, -1)
      for name in ("cosine_distillation_loss", "target_distribution_loss")],
    (distillation, "cosine_distillation_loss", {"teacher_hidden": torch.zeros(B - 1, S, 12).double()}, "teacher_hidden",
     f"have shape [{B}, {S}, 12]", [B - 1, S, 12]),
    (distillation, "cosine_distillation_loss", {"target": targets(B, S + 1)}, "target", f"have shape [{B}, {S}]",
     [B, S + 1]),
    (distillation, "cosine_distillation_loss", {"teacher_bias": torch.zeros(1)}, "teacher_bias",
     f"have shape [{CLASSES}]", [1]),
    (distillation, "target_distribution_loss", {"eps": -1e-9}, "eps", NOT_NEGATIVE, -1e-9),
    (distillation, "target_distribution_loss", {"mask": torch.ones(B, 1)}, "mask", f"have shape [{B}, {S}]", [B, 1]),
    (distillation, "target_distribution_loss", {"probabilities": torch.ones(B, S, 1)}, "probabilities",
     f"have shape [{B}, {S}, {CLASSES}]", [B, S, 1]),
]  # fmt: skip


@pytest.mark.parametrize(
    "call, name, options, argument, rule, got", CASES, ids=[f"{case[1]}-{case[3]}-{case[5]}" for case in CASES]
)
def test_wrong_arguments(call, name, options, argument, rule, got):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {argument} must {rule} (got {got})')}$"):
        call(name, **options)


# Of which the rule is longer, or an operator's.
MESSAGES = [
    (preference, "dpo_loss", dict(loss_type="best"), "loss_type must be sigmoid, .* or discopop .got best"),
    (preference, "dpo_loss", dict(loss_type="exo_pair"), r"label_smoothing must be in \(0, 1\) for exo_pair \(got 0.0"),
    (preference, "dpo_loss", dict(loss_type="robust", label_smoothing=0.5),
     r"label_smoothing must be in \[0, 0.5\) for robust \(got 0.5"),
    (preference, "cpo_loss", dict(hidden=model(3, S).hidden, target=targets(3, S)),
     r"target must have shape \(2 B, S\) \(got \[3, 7\]"),
    (preference, "dpo_loss", dict(ref_log_probs=torch.zeros(B, S)), r"ref_log_probs must have shape \[4\] \(got \[4, 7\]"),
    (preference, "kto_loss", dict(kl=torch.zeros(2)), r"kl must have shape \[\] or \[1\] or \[4\] \(got \[2\]"),
    (preference, "kto_loss", dict(desirable=torch.ones(B)), r"desirable must be bool of shape \[4\]"),
    *[(call, name, dict(temperature=value), f"temperature must be {rule}")
      for call, name in ((preference, "dpo_loss"), (policy, "grpo_loss"))
      for value, rule in ((0.0, "positive"), (-1.0, "positive"), (math.nan, "finite"))],
    (policy, "grpo_loss", dict(loss_type="ppo"), "loss_type must be one of grpo, .* .got ppo"),
    (policy, "grpo_loss", dict(loss_type="sapo", importance_sampling_level="sequence"),
     "importance_sampling_level must be token with loss_type sapo .got sequence"),
    (policy, "grpo_loss", dict(importance_sampling_level="batch"), "importance_sampling_level must be token or sequence"),
    (policy, "grpo_loss", dict(loss_type="cispo", delta=2.0), "delta must be None with loss_type cispo .got 2.0"),
    (policy, "grpo_loss", dict(loss_type="dr_grpo"), "max_completion_length must be given for dr_grpo"),
    (policy, "grpo_loss", dict(mask=torch.ones(B, S - 1)), r"mask must have shape \[4, 7\] \(got \[4, 6\]"),
    *[(policy, "grpo_loss", {name: torch.zeros(shape)}, rf"{name} must have shape \[4.*got \[{shape[0]}")
      for name, shape in {"old_log_probs": (B, 1), "ref_log_probs": (S,), "vllm_is_ratio": (B, S + 1)}.items()],
    (policy, "grpo_loss", dict(advantages=torch.zeros(B, 1)),
     r"advantages must have shape \[4\] or \[4, 7\] \(got \[4, 1\]"),
    (distillation, "distillation_loss", dict(target=None, hard_weight=1.0), "target must be given with hard_weight"),
    *[(distillation, name, dict(teacher_weight=torch.zeros(CLASSES - 1, 12).double()), f"{argument} must have 37 {what}")
      for name, argument, what in (("distillation_loss", "t_weight", "classes"),
                                   ("cosine_distillation_loss", "teacher_weight", "rows"))],
    (distillation, "distillation_loss", dict(mask=torch.ones(1, B, S)), r"mask must have shape \[4, 7\] \(got \[1, 4, 7"),
    (distillation, "topk_distillation_loss", dict(mask=torch.ones(1)), r"mask must have shape \[4, 7\] \(got \[1\]"),
    (distillation, "topk_distillation_loss", dict(teacher_ids=torch.zeros(B - 1, S, 1).long()),
     r"teacher_ids must have shape \[4, 7, 'K'\] \(got \[3, 7, 1\]"),
    (distillation, "topk_distillation_loss", dict(teacher_log_probs=torch.zeros(B, S, 2)),
     r"teacher_log_probs must have shape \[4, 7, 1\] \(got \[4, 7, 2\]"),
]  # fmt: skip


@pytest.mark.parametrize(
    "call, name, options, message", MESSAGES, ids=[f"{name}-{message}" for _, name, _, message in MESSAGES]
)
def test_messages(call, name, options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(name, **options)


@pytest.mark.parametrize("call, name", [(preference, "dpo_loss"), (preference, "kto_loss"), (policy, "grpo_loss")])
def test_limits_are_allowed(call, name):
    options = {"dpo_loss": {"label_smoothing": 0.5}, "grpo_loss": {"epsilon_high": math.inf, "epsilon_low": 1.0}}
    loss, _ = call(name, **reference(), **options.get(name, {}))
    assert loss.isfinite()
