"""Wrong arguments of the losses are errors that name the loss, the argument, the rule and the value."""

import math
import re

import pytest
import torch
from post_training import CLASSES, B, S, model, targets

from liger_ops import losses

POSITIVE, NOT_NEGATIVE = "be positive and finite", "be finite and not negative"


def heads():
    m, teacher = model(B, S), model(B, S, width=12, frozen=True)
    return m, teacher, targets(B, S)


def preference(name, **options):
    m, _, target = heads()
    if name == "kto_loss":
        return losses.kto_loss(m.hidden, m.weight, target, torch.arange(B) < 2, m.bias, **options)
    return getattr(losses, name)(m.hidden, m.weight, target, m.bias, **options)


def policy(name="grpo_loss", **options):
    m, _, target = heads()
    mask, advantages = torch.ones(B, S), torch.randn(B)
    return losses.grpo_loss(m.hidden, m.weight, target.clamp(min=0), mask, advantages, m.bias, **options)


def distillation(name, **options):
    m, teacher, target = heads()
    if name == "topk_distillation_loss":
        ids, logs = torch.zeros(B, S, 1, dtype=torch.long), torch.full((B, S, 1), -1.0)
        given = {"teacher_ids": ids, "teacher_log_probs": logs, "target": target} | options
    elif name == "target_distribution_loss":
        given = {"probabilities": torch.full((B, S, CLASSES), 1 / CLASSES)} | options
    else:
        given = {"teacher_hidden": teacher.hidden, "teacher_weight": teacher.weight, "target": target} | options
    return getattr(losses, name)(m.hidden, m.weight, **given)


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


@pytest.mark.parametrize("call, name", [(preference, "dpo_loss"), (preference, "kto_loss"), (policy, "grpo_loss")])
def test_limits_are_allowed(call, name):
    options = {"dpo_loss": {"label_smoothing": 0.5}, "grpo_loss": {"epsilon_high": math.inf, "epsilon_low": 1.0}}
    loss, _ = call(name, **reference(), **options.get(name, {}))
    assert loss.isfinite()
