"""Models with LoRA layers of peft, and the calls that patched ones make."""

import copy
from collections import Counter
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear

from liger_ops._accuracy import Roundings, rounded
from liger_ops.linear import project
from liger_ops.transformers import apply_liger_kernel
from tests.support.checks import assert_no_worse
from tests.support.models.language_models import make, step
from tests.support.models.patched_models import logits_of

# Projections in one call: q, k and v; o; gate and up; down.
CALLS = [3, 1, 2, 1]
LAYERS = 2
BASE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Call(NamedTuple):
    projections: int
    adapters: int


def record_calls(monkeypatch):
    """Of lora_projections, and of gated_lora_projection, which projects a product."""
    found, function, gated = [], project.lora_projections, project.gated_lora_projection

    def recorded(x, weights, biases, a, *others):
        found.append(Call(len(weights), len(a)))
        return function(x, weights, biases, a, *others)

    def recorded_gated(op, options, gate, up, weight, bias, a, *others):
        found.append(Call(1, len(a)))
        return gated(op, options, gate, up, weight, bias, a, *others)

    monkeypatch.setattr(project, "lora_projections", recorded)
    monkeypatch.setattr(project, "gated_lora_projection", recorded_gated)
    return found


def taken(calls):
    """The sizes of the calls since the last time."""
    found = [call.projections for call in calls]
    calls.clear()
    return found


def with_adapters(model, adapter_dtype=None, **options):
    torch.manual_seed(1)
    # B is zero at the start of a training: no gradient would reach A.
    given = {"r": 4, "lora_alpha": 6, "target_modules": BASE, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**given), autocast_adapter_dtype=adapter_dtype != torch.bfloat16)


def build(order, name="llama", dtype=torch.float32, adapter_dtype=None, switches=None, **options):
    """order: "" for peft's own, or when the model is patched: "before" or "after" it gets its adapters."""
    model, report = make(name, dtype=dtype), None
    if order == "before":
        report = apply_liger_kernel(model, **(switches or {}))
    model = with_adapters(model, adapter_dtype, **options)
    if order == "after":
        report = apply_liger_kernel(model, **(switches or {}))
    return model, report


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def lora_rows(report):
    return Counter((row.replacement, row.reason) for row in report.rows if row.kind == "lora")


def results(model, ids):
    """Logits, loss and gradients of the adapters."""
    logits = logits_of(model.eval(), ids)
    loss, gradients = step(model.train(), ids)
    assert gradients and all("lora_" in name for name in gradients)
    return {"logits": logits, "loss": loss, **gradients}


def assert_as_accurate(ours, theirs, model, ids, precision):
    """ours, theirs: results of two codes for the model. model: with peft's own code, which becomes fp64."""
    model = copy.deepcopy(model).double()
    exact, parameters = results(model, ids), [*model.parameters()]
    saved = [p.detach().clone() for p in parameters]

    def of_rounded(draw):
        for p, value in zip(parameters, rounded(saved, precision, draw)):
            p.data.copy_(value.detach())
        return [*results(model, ids).values()]

    bounds = Roundings([*exact.values()], of_rounded, saved, precision, smooth=True)
    scale = max(float(exact[name].abs().max()) for name in exact if "lora_" in name)
    assert ours.keys() == theirs.keys() == exact.keys()
    for i, name in enumerate(exact):
        of = scale if "lora_" in name else 0.0
        assert_no_worse(name, ours[name], theirs[name], exact[name], of, bounds=(bounds, i))
