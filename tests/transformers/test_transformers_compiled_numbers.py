"""torch.compile of several patched models in one process, whose modules have different numbers.

From its second value on, torch.compile makes a float of a class or a module symbolic.
"""

import functools

import pytest
import torch

from liger_ops.transformers import apply_liger_kernel
from tests.support.models.language_models import step, tokens
from tests.support.models.lora_layers import with_adapters
from tests.support.models.patched_models import assert_as_exact, own_names
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("as_large_models", "fresh_dynamo")

ONE = {"num_hidden_layers": 1}
ATTENTION = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
COMPRESSED = {
    "num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"],
}  # fmt: skip


def layers_of(model):
    return (model.get_base_model() if hasattr(model, "peft_config") else model).model.layers


def check_compiled(models, device, by_layer):
    """models: functions that make them."""
    for i, build in enumerate(models):
        model, ids = build().to(device), tokens().to(device)
        torch.manual_seed(1)
        plain = step(model, ids)
        assert apply_liger_kernel(model, memory_budget=1000 * (i + 1)).replaced
        compiled = model
        if by_layer:
            for layer in layers_of(model):
                layer.compile(backend="aot_eager", fullgraph=True)
        else:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_as_exact(functools.partial(results, compiled, ids, plain[1]), ([plain[0]], [*plain[1].values()]), model)


def results(model, ids, names):
    """The loss, and these gradients: torch.compile returns zeros where eager code computes none."""
    loss, gradients = step(model, ids)
    gradients = own_names(gradients)
    return [loss], [gradients[name] for name in names]


def of(name, **options):
    return functools.partial(tiny, name, **options)


def adapted(alpha, name="llama", **options):
    return lambda: with_adapters(tiny(name, **options), lora_alpha=alpha, target_modules="all-linear")


@pytest.mark.thorough
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_models_with_other_norms(by_layer, device):
    models = [
        of("gemma", **ONE), of("llama", rms_norm_eps=1e-2, **ONE), of("gemma", rms_norm_eps=0.1, **ONE),
        of("qwen3_next", **ATTENTION),
    ]  # fmt: skip
    check_compiled(models, device, by_layer)


OF_CLASSES = {
    "norms of heads": [of("qwen3", **ONE), of("gemma3_text", **ONE)],
    "gated norms": [of("qwen3_next"), of("bamba", rms_norm_eps=0.1)],
    "softcaps": [of("gemma2", final_logit_softcapping=cap, **ONE) for cap in (30.0, 3.0)],
    "multipliers": [
        of("granite", logits_scaling=scale, embedding_multiplier=scale, residual_multiplier=1 / scale, **ONE)
        for scale in (4.0, 2.0)
    ],
    "limits, connections and routers": [
        of(
            "deepseek_v4",
            swiglu_limit=limit,
            routed_scaling_factor=50 * limit,
            rms_norm_eps=limit,
            hc_eps=limit / 9,
            **COMPRESSED,
        )
        for limit in (0.01, 0.02)
    ],
    "limits of experts": [of("gpt_oss", num_local_experts=2, swiglu_limit=limit, **ONE) for limit in (0.2, 7.0)],
    "adapters": [adapted(alpha, **ONE) for alpha in (6, 9)],
    "adapters of limited gates": [
        adapted(alpha, "hy_v4", swiglu_limit=alpha / 100, mlp_layer_types=["dense"], **ONE) for alpha in (6, 9)
    ],
}


@pytest.mark.thorough
@pytest.mark.parametrize("models", OF_CLASSES.values(), ids=OF_CLASSES)
def test_classes_with_other_numbers(models, device):
    check_compiled(models, device, False)
