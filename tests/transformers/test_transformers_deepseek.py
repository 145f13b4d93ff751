"""What DeepSeek-V4 and its relatives compute differently: clamped gates."""

import importlib.util

import pytest
import torch
from checks import path_taken
from language_models import SIZES, known, make, step, tokens
from patched_models import assert_as_exact, assert_same_step, trained
from torch import nn

from liger_ops.transformers import apply_liger_kernel, probe, unpatch

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_local_experts": 3, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Limits that many gates of a tiny model are beyond.
MODELS = {
    "deepseek_v4": {
        **{"swiglu_limit": 0.01, "hc_mult": 2, "layer_types": ["sliding_attention"] * 2, "head_dim": 16},
        **{"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 8, "num_key_value_heads": 1},
        **{"mlp_layer_types": ["moe", "hash_moe"], **EXPERTS},
    },
    "hy_v4": {
        **{"swiglu_limit": 0.01, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
        **{"index_head_dim": 8, "index_n_heads": 2, **LATENT, **EXPERTS},
    },
}
# Operators that replace classes of these models.
REPLACED = {"deepseek_v4": {"DeepseekV4MLP": "swiglu", "DeepseekV4Experts": "moe_experts"}}
REPLACED["hy_v4"] = {"HYV4MLP": "swiglu", "HYV4Experts": "moe_experts"}


def model_of(name, **options):
    return make(name, **{k: v for k, v in {**MODELS[name], **options}.items() if SIZES.get(k) != v})


@pytest.mark.parametrize("name", known(MODELS))
def test_training_and_generation(name):
    model, ids = model_of(name), tokens()
    losses, plain = trained(model), step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False)
    report = apply_liger_kernel(model.train())
    found = {row.type: row.replacement for row in report.rows}
    assert REPLACED[name].items() <= found.items(), str(report)
    assert_same_step(model, ids, plain)
    assert_as_exact(lambda: trained(model), losses, model)
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    assert unpatch(model) and torch.equal(step(model.train(), ids)[0], plain[0])


# ---- Clamped gates


class MLP(nn.Module):
    """With gate and up apart, or packed."""

    def __init__(self, limit, packed=False, most=None, hidden=8, inner=20):
        super().__init__()
        self.limit, self.most = limit, most or limit
        if packed:
            self.gate_up_proj = nn.Linear(hidden, 2 * inner)
        else:
            self.gate_proj, self.up_proj = nn.Linear(hidden, inner), nn.Linear(hidden, inner)
        self.down_proj = nn.Linear(inner, hidden)

    def forward(self, x):
        gate, up = (
            self.gate_up_proj(x).chunk(2, -1) if hasattr(self, "gate_up_proj") else (self.gate_proj(x), self.up_proj(x))
        )
        return self.down_proj(nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.most))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [0.05, 7, 500.0])
def test_limits_are_found(limit, packed):
    """Whether random numbers of the MLP's own input reach them or not."""
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(limit, packed)), 4000 * torch.randn(5, 8, dtype=torch.float64)
    expected = model.double()(x)
    assert apply_liger_kernel(model).rows[0].replacement == "swiglu"
    with path_taken("cpu"):
        torch.testing.assert_close(model(x), expected)
    assert probe.identify_mlp(model[0]).limit == limit


def test_other_clamps_are_left_alone():
    for most in (0.5, 8.0, 5000.0):
        with pytest.warns(RuntimeWarning, match="left as it is"):
            report = apply_liger_kernel(nn.Sequential(MLP(7.0, most=most)))
        assert report.rows[0].reason == "computes something else"


CLASSES = [("deepseek_v4", "DeepseekV4MLP"), ("glm5_next", "Glm5NextTextMLP")]
CLASSES = [row for row in CLASSES if importlib.util.find_spec(f"transformers.models.{row[0]}")]


@pytest.mark.parametrize("model_type, cls", CLASSES)
def test_classes(model_type, cls):
    source = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    configuration = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    config = getattr(configuration, cls.replace("MLP", "Config"))(hidden_size=16, swiglu_limit=0.25)
    config.intermediate_size = 24
    mlp = getattr(source, cls)(config)
    assert (probe.identify_mlp(mlp).formula, probe.identify_mlp(mlp).limit) == ("swiglu", 0.25)


def test_gates_of_experts_whose_stack_is_not_understood():
    model, ids = model_of("hy_v4"), tokens()
    plain = step(model, ids)
    rows = apply_liger_kernel(model, moe_experts=False).rows
    assert [row.replacement for row in rows if row.kind == "experts"] == ["swiglu"]
    assert_same_step(model, ids, plain)
