"""Reports: rows of modules without an operator, the share of the parameters that operators cover, and the options."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from liger_ops.transformers import apply_liger_kernel
from tests.support.models.language_models import ARCHITECTURES, known, make
from tests.support.models.patched_models import FUSED
from tests.support.models.tiny_models import TINY, tiny

UNKNOWN = "is of no kind that operators replace"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}


def t5():
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return T5ForConditionalGeneration(config)


def nemotron():
    return tiny("nemotron_h", **EXPERTS, layers_block_type=["moe", "attention"])


MODELS = {
    "T5DenseGatedActDense": (t5, "other"),
    "T5Attention": (t5, "attention"),
    "NemotronHExperts": (nemotron, "experts"),
    "NemotronHTopkRouter": (nemotron, "router"),
    "NemotronHAttention": (nemotron, "attention"),
    "MixtralTopKRouter": (lambda: make("mixtral"), "router"),
    "Qwen3MoeTopKRouter": (lambda: make("qwen3_moe"), "router"),
    "GptOssTopKRouter": (lambda: tiny("gpt_oss"), "router"),
    "Conv1D": (lambda: make("gpt2"), "other"),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_without_an_operator_have_a_row(name):
    build, kind = MODELS[name]
    model = build()
    report = apply_liger_kernel(model)
    rows = [row for row in report.rows if row.type == name]
    assert rows and {(row.kind, row.replacement, row.reason) for row in rows} == {(kind, "", UNKNOWN)}
    assert {row.module for row in rows} == {path for path, m in model.named_modules() if type(m).__name__ == name}
    assert report.rows[-1].kind == "loss" and apply_liger_kernel(model).rows == report.rows


NAMES = known([*ARCHITECTURES, *TINY])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n not in ("qwen3_moe", "qwen3_next"))) for n in NAMES]
)
def test_every_parameter_is_in_a_row(name):
    """Of its module, or of one around it, but for those around everything."""
    model = tiny(name)
    report = apply_liger_kernel(model)
    rows = {row.module for row in report.rows if row.kind not in ("loss", "packing", "layer")} | {"lm_head"}
    for path, module in model.named_modules():
        if [*module.parameters(recurse=False)]:
            assert any(f"{path}.".startswith(f"{row}.") for row in rows), path
    assert 0 < report.coverage.covered_parameters <= report.coverage.parameters
    assert report.coverage.parameters == sum(p.numel() for p in model.parameters())


def test_coverage_counts_what_operators_read():
    model = make("qwen3_moe", tie_word_embeddings=True)
    for layer in model.model.layers:
        layer.mlp.gate.bfloat16()
    routers = sum(layer.mlp.gate.weight.numel() for layer in model.model.layers)
    whole = sum(p.numel() for p in model.parameters())
    report = apply_liger_kernel(model)
    assert report.coverage == (whole, whole - routers, 4 * whole - 2 * routers, 4 * (whole - routers))
    assert sum(row.replacement == FUSED for row in report.rows) == 1
    model = make("llama")
    attention = sum(p.numel() for layer in model.model.layers for p in layer.self_attn.parameters())
    off = dict(rope=False, fused_linear_cross_entropy=False)
    report = apply_liger_kernel(
        model, **off, memory_budget=1 << 20, fp8="rowwise", fp8_filter=lambda module, name: False
    )
    rest = attention + model.lm_head.weight.numel()
    assert report.coverage.covered_parameters == report.coverage.parameters - rest
    assert report.as_dict()["options"] == {"switched_off": [*off], "memory_budget": 1 << 20, "fp8": "rows"}
    last = str(report).splitlines()[-1]
    assert last.endswith("; switched off: rope, fused_linear_cross_entropy; memory_budget=1048576; fp8='rows'")


def test_what_is_left_is_never_rounded_away():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.rest = nn.RMSNorm(1 << 16, eps=1e-6), nn.Parameter(torch.ones(1))

    report = apply_liger_kernel(Model())
    assert str(report).splitlines()[-1] == "operators cover 99.9 % of the parameters and 99.9 % of their bytes"
    assert [(row.module, row.kind) for row in report.rows] == [("norm", "norm"), ("", "other"), ("", "loss")]
