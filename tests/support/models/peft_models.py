"""Kinds of models with adapters of peft, what a patched one calls in a step, and what peft does with its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from liger_ops.linear import peft
from liger_ops.transformers import apply_liger_kernel, deferred
from tests.support.models.language_models import make
from tests.support.models.lora_bases import adapt, replace_linears, with_bases
from tests.support.models.lora_layers import BASE, CALLS, LAYERS, build, record_calls, with_adapters

HEAD = ["lm_head"]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = dict(vocab_size=64, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64)
    config = AutoConfig.for_model("gpt2", **sizes, **dropout, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def over_base(base: str, order: str, dtype=torch.float32, adapter_dtype=None, **options: Any):
    """As `build`, over the bases of lora_bases.py."""
    model, targets = (gpt2(), ["c_attn", "c_proj", "c_fc"]) if base == "conv1d" else (make("llama"), BASE)
    model = model.to(dtype)
    model = model if base == "conv1d" else with_bases(model, base)
    report = apply_liger_kernel(model) if order == "before" else None
    model = adapt(model, base, targets, adapter_dtype, **options)
    if order:
        report = apply_liger_kernel(model)
    return model, report


def in_four_bits(model, compute_dtype=torch.bfloat16, quant_type="nf4", nested=True):
    def quantised(linear):
        made = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, compute_dtype, nested, quant_type
        )
        made.load_state_dict(linear.state_dict())
        # In evaluation some CPUs would change the weight to a layout that cannot be trained.
        made.support_avx512bf16_for_cpu = False
        return made.to("cpu")

    model.is_loaded_in_4bit = True
    return replace_linears(model, quantised)


def four_bits(order: str, name="llama", dtype=torch.bfloat16, switches=None, layers=LAYERS, **options: Any):
    model, report = in_four_bits(make(name, dtype=dtype, num_hidden_layers=layers), **options), None
    if order == "before":
        report = apply_liger_kernel(model, **(switches or {}))
    model = with_adapters(model)
    if order == "after":
        report = apply_liger_kernel(model, **(switches or {}))
    return model, report


class Kind(NamedTuple):
    build: Callable  # as lora_layers.build
    calls: list[int]  # in a step, as `record` returns them


ALL = LAYERS * CALLS
BASES = ("int8", "gptq", "hooked", "conv1d", "awq", "aqlm", "te", "eetq", "hqq", "linear")
KINDS = {
    "layers": Kind(build, ALL),
    "head": Kind(partial(build, target_modules=HEAD), [4]),
    "dropout": Kind(partial(build, lora_dropout=0.25), ALL),
    "dropout of the head": Kind(partial(build, target_modules=HEAD, lora_dropout=0.25), [4]),
    "biases": Kind(partial(build, name="qwen2"), ALL),
    "gptq and dropout": Kind(partial(over_base, "gptq", lora_dropout=0.25), ALL),
    "four bits": Kind(four_bits, ALL),
    **{base: Kind(partial(over_base, base), LAYERS * [1, 1, 1, 1] if base == "conv1d" else ALL) for base in BASES},
}


def record(monkeypatch, kind: str) -> Callable[[], list[int]]:
    """Returns what was called since the last time: numbers of projections, or the ranks of the addend of the fused loss, 0 for
    none."""
    if "head" not in kind:
        calls = record_calls(monkeypatch)
    else:
        calls, function = [], deferred.F.fused_linear_cross_entropy

        def recorded(*args, low_rank_input=None, **options):
            calls.append(0 if low_rank_input is None else low_rank_input.shape[-1])
            return function(*args, low_rank_input=low_rank_input, **options)

        monkeypatch.setattr(deferred.F, "fused_linear_cross_entropy", recorded)

    def taken():
        found = [getattr(call, "projections", call) for call in calls]
        calls.clear()
        return found

    return taken


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if peft.is_lora(module)]


# ---- What peft does with its layers


def second_adapter(model, **options):
    torch.manual_seed(2)
    config = copy.deepcopy(model.peft_config["default"])
    for name, value in {"r": 3, "lora_alpha": 5, **options}.items():
        setattr(config, name, value)
    model.add_adapter("other", config)


def switch(model, **options):
    second_adapter(model, **options)
    model.set_adapter("other")


def only_on_q(model):
    switch(model, target_modules=["q_proj"])


def switch_to_dora(model):
    switch(model, use_dora=True)


def two_adapters(model):
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def merge(model):
    model.merge_adapter()


def unmerge(model):
    model.merge_adapter()
    model.unmerge_adapter()


def disable(model):
    return model.disable_adapter()


def disable_merged(model):
    model.merge_adapter()
    return model.disable_adapter()


def enable_again(model):
    with model.disable_adapter():
        pass


def set_scale(model):
    for layer in adapted_layers(model):
        layer.set_scale("default", 3.0)


def scale_and_unscale(model):
    for layer in adapted_layers(model):
        layer.scale_layer(3.0)
        layer.unscale_layer(2.0)


def delete(model):
    two_adapters(model)
    model.delete_adapter("default")
    model.set_adapter("other")


def combine(model):
    second_adapter(model)
    model.add_weighted_adapter(["default", "other"], [0.5, 0.7], "both", combination_type="cat")
    model.set_adapter("both")


# With what a step calls afterwards, where it is not what it called before.
CHANGES = {switch: ALL, two_adapters: ALL, set_scale: ALL, disable: []}
MERGES = {merge: [], unmerge: ALL}
OTHERS = {
    disable_merged: [],
    enable_again: ALL,
    only_on_q: LAYERS * CALLS[:1],
    scale_and_unscale: ALL,
    delete: ALL,
    combine: ALL,
}
# The loss without a low-rank addend, or of logits.
OF_HEAD = {
    unmerge: [4],
    merge: [0],
    disable: [0],
    disable_merged: [],
    switch: [3],
    two_adapters: [7],
    set_scale: [4],
    switch_to_dora: [],
}
OPERATIONS = [
    *(("layers", *case) for case in {**CHANGES, **MERGES, **OTHERS}.items()),
    *(("head", *case) for case in OF_HEAD.items()),
    *(
        pytest.param(base, operation, calls and KINDS[base].calls, marks=[pytest.mark.thorough] * (i > 3))
        for i, base in enumerate(BASES)
        for operation, calls in (CHANGES | MERGES if base in ("int8", "conv1d", "hooked") else CHANGES).items()
    ),
]
