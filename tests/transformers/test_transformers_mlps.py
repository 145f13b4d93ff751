"""Which MLPs are understood: sizes that coincide, and why others are left alone."""

import importlib
import itertools

import pytest
import torch
from torch import nn
from transformers import GraniteMoeSharedConfig, LlamaConfig, Phi3Config

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, modules, probe, unpatch
from liger_ops.transformers.patched import NotUnderstood
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.patched_models import assert_same_step
from tests.support.models.tiny_models import tiny

CONFIGS = {"llama": LlamaConfig, "phi3": Phi3Config, "granitemoeshared": GraniteMoeSharedConfig}
CLASSES = {"llama": "LlamaMLP", "phi3": "Phi3MLP", "granitemoeshared": "GraniteMoeSharedMLP"}


class SlicedMLP(nn.Module):
    """Reads its sizes in forward, under names that do not tell them apart."""

    def __init__(self, n, m):
        super().__init__()
        self.m, self.n = m, n
        self.both, self.back = nn.Linear(n, 2 * m), nn.Linear(m, n)

    def forward(self, x):
        y = self.both(x.view(-1, self.n))
        return self.back(nn.functional.silu(y[:, : self.m]) * y[:, self.m :]).view(x.shape)


@pytest.mark.parametrize("inner", [32, 16, 64, 24])
@pytest.mark.parametrize("name", [*CLASSES, "sliced"])
def test_sizes_that_coincide(name, inner):
    """32: inner is hidden. 16: gate and up together are. 64: inner is twice hidden."""
    if name == "sliced":
        mlp = SlicedMLP(32, inner)
    else:
        source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        sizes = dict(hidden_size=32, intermediate_size=inner, shared_intermediate_size=inner)
        mlp = getattr(source, CLASSES[name])(CONFIGS[name](**sizes, pad_token_id=0))
    model, x = nn.Sequential(mlp), torch.randn(3, 32)
    expected = model(x)
    assert apply_liger_kernel(model).rows[0].replacement == "swiglu"
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_models_whose_sizes_coincide(name):
    model, ids = make(name, intermediate_size=32), tokens()
    plain = step(model, ids)
    assert "mlp" not in {row.kind for row in apply_liger_kernel(model).left_alone}
    assert_same_step(model, ids, plain)


@pytest.mark.parametrize("order", [*itertools.permutations(("first", "second", "third"))])
def test_roles_do_not_depend_on_the_order_of_children(order):
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(8, 8))

        def forward(self, x):
            return self.second(nn.functional.silu(self.third(x)) * self.first(x))

    assert probe.identify_mlp(MLP()).projections == ("third", "first", "second")


class FailingMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        raise ValueError("takes pairs of rows only\nand more")


class FailingNorm(nn.RMSNorm):
    def forward(self, x):
        raise ValueError("takes pairs of rows only\nand more")


@pytest.mark.parametrize("module", [FailingMLP(), FailingNorm(8, eps=1e-6)], ids=lambda m: type(m).__name__)
def test_reasons_tell_what_was_raised(module):
    with pytest.warns(RuntimeWarning, match="left as it is"):
        (row,) = apply_liger_kernel(nn.Sequential(module)).rows[:1]
    assert row.reason.endswith("(ValueError: takes pairs of rows only)")


# ---- Multipliers


def falcon(**options):
    return tiny("falcon_h1", **{"mlp_multipliers": [0.55, 0.3], **options})


def mlps_of(model):
    return [m for m in model.modules() if type(m).__name__ == "FalconH1MLP"]


@pytest.mark.parametrize("multipliers", [[0.55, 0.3], [1.0, 1.0]], ids=str)
def test_multipliers_are_read_at_each_call(multipliers):
    model, ids = falcon(mlp_multipliers=multipliers), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model)
    assert {row.replacement for row in report.rows if row.kind == "mlp"} == {"swiglu"}
    assert "swiglu_linear" in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(model, ids, plain)
    for mlp in mlps_of(model):
        mlp.gate_multiplier, mlp.down_multiplier = 1.7, 0.6
    ours = step(model, ids)
    unpatch(model)
    assert_same_step(model, ids, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_multipliers_round_as_in_the_model(dtype):
    (mlp, *_), x = mlps_of(falcon(dtype=dtype)), torch.randn(7, 32).to(dtype)
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    expected = F.swiglu_linear(gate(x) * mlp.gate_multiplier, up(x), down.weight, None) * mlp.down_multiplier
    modules.patch_mlp(mlp, probe.identify_mlp(mlp))
    assert torch.equal(mlp(x), expected)


class ScaledMLP(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.form, self.scale = form, 0.5

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.form == "product":
            return self.down_proj(nn.functional.silu(gate) * up * self.scale)
        if self.form == "activation":
            return self.down_proj(nn.functional.silu(gate) * self.scale * up)
        return self.down_proj(nn.functional.silu(self.scale * gate) * up)


@pytest.mark.parametrize("form, factors", [("gate", ("scale", None)), ("product", None), ("activation", None)])
def test_factors_elsewhere_are_left_alone(form, factors):
    """They round elsewhere."""
    mlp = ScaledMLP(form)
    if factors is None:
        with pytest.raises(NotUnderstood, match="computes something else"):
            probe.identify_mlp(mlp)
    else:
        assert probe.identify_mlp(mlp).factors == factors


def test_multipliers_beside_adapters_fp8_and_compiled():
    peft = pytest.importorskip("peft")
    model, ids = falcon(intermediate_size=48), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    for mlp in mlps_of(model):
        mlp.compile(backend="aot_eager", fullgraph=True)
    assert_same_step(model, ids, plain, use_cache=False)
    unpatch(model)
    names = ["gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False))
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(model, ids, plain)
    model = falcon()
    apply_liger_kernel(model, fp8="rows")
    assert torch.isfinite(step(model, ids)[0])
    mlp, x = mlps_of(model)[0], torch.randn(4, 32)
    gate, up = mlp.gate_proj(x) * mlp.gate_multiplier, mlp.up_proj(x)
    torch.testing.assert_close(mlp(x), mlp.down_proj(F.swiglu(gate, up)) * mlp.down_multiplier)
