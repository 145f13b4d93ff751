"""What DeepSeek models and their relatives compute differently: clamped gates, routers by roots, rotations of pairs."""

import importlib.util

import pytest
import torch
from torch import nn

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, modules, probe, routers, unpatch
from tests.support.checks import path_taken
from tests.support.models.language_models import known, step, tokens
from tests.support.models.patched_models import assert_same_step
from tests.support.models.tiny_models import tiny

# Operators that replace classes of these models.
REPLACED = {
    "deepseek_v4": {
        "DeepseekV4MLP": "swiglu",
        "DeepseekV4Experts": "moe_experts",
        "DeepseekV4TopKRouter": "moe_router",
        "DeepseekV4HashRouter": "moe_router",
        "DeepseekV4Attention": "rope",
        "DeepseekV4HCACompressor": "rope",
        "DeepseekV4CSACompressor": "rope",
        "DeepseekV4Indexer": "rope",
    },
    "hy_v4": {"HYV4MLP": "swiglu", "HYV4Experts": "moe_experts"},
    "deepseek_v3": {"DeepseekV3Attention": "rope"},
    "deepseek_v32": {"DeepseekV32Attention": "rope"},
}


@pytest.mark.parametrize("name", known(REPLACED))
def test_replaced_classes(name):
    report = apply_liger_kernel(tiny(name))
    assert REPLACED[name].items() <= {row.type: row.replacement for row in report.rows}.items(), str(report)


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
    model, ids = tiny("hy_v4"), tokens()
    plain = step(model, ids)
    rows = apply_liger_kernel(model, moe_experts=False).rows
    assert [row.replacement for row in rows if row.kind == "experts"] == ["swiglu"]
    assert_same_step(model, ids, plain)


# ---- Routers

HIDDEN, CHOICES, TOKENS, VOCABULARY = 16, 3, 40, 64
needs_v4 = pytest.mark.skipif(not known(["deepseek_v4"]), reason="this release of transformers has no DeepSeek-V4")


def router_of(cls="DeepseekV4TopKRouter", dtype=torch.float32):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as source

    torch.manual_seed(0)
    sizes = dict(hidden_size=HIDDEN, num_local_experts=12, n_routed_experts=12, num_experts_per_tok=CHOICES)
    router = getattr(source, cls)(source.DeepseekV4Config(**sizes, vocab_size=VOCABULARY, routed_scaling_factor=1.5))
    nn.init.normal_(router.weight, std=0.5)
    if cls == "DeepseekV4HashRouter":
        router.tid2eid.copy_(torch.stack([torch.randperm(12)[:CHOICES] for _ in range(VOCABULARY)]))
    else:
        # Distances between scores that no rounding closes.
        router.e_score_correction_bias.copy_(8 * torch.randperm(12))
    router.weight.data = router.weight.data.to(dtype)
    return nn.Sequential(router)


def arguments_of(cls, dtype=torch.float32):
    x = torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return (x, tokens(2, TOKENS // 2)) if cls == "DeepseekV4HashRouter" else (x,)


def routed(router, arguments):
    """Weights and experts by expert, and the gradients of the input and the weight."""
    logits, weights, experts = router(*arguments)
    grads = torch.autograd.grad((weights * weights).sum() + logits.sum(), (arguments[0], router.weight))
    return weights.dtype, *routers.in_order(logits, weights, experts), *grads


ROUTERS = ["DeepseekV4TopKRouter", "DeepseekV4HashRouter"]


@needs_v4
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", ROUTERS)
def test_routers(cls, dtype):
    model, arguments = router_of(cls, dtype), arguments_of(cls, dtype)
    plain = routed(model[0], arguments)
    (row,) = (row for row in apply_liger_kernel(model).rows if row.kind == "router")
    assert (row.type, row.replacement, row.reason) == (cls, "moe_router", "")
    with path_taken("cpu"):
        found = routed(model[0], arguments)
    assert found[0] == plain[0] == dtype and torch.equal(found[3], plain[3])
    # Ours rounds once after the division and the scale; theirs after each step, as in their gradients.
    close = dict(rtol=2**-6, atol=2**-6) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((*found[1:3], *found[4:]), (*plain[1:3], *plain[4:])):
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours / scale, theirs / scale, **close)
    compiled = torch.compile(model[0], fullgraph=True, backend="aot_eager", dynamic=True)
    assert all(map(torch.equal, compiled(*arguments), model[0](*arguments)))
    assert unpatch(model) == 1 and torch.equal(routed(model[0], arguments)[2], plain[2])


@needs_v4
@pytest.mark.parametrize("cls", ROUTERS)
def test_routers_that_run_their_own_forward(cls, monkeypatch):
    model, (x, *ids) = router_of(cls), arguments_of(cls)
    apply_liger_kernel(model)
    monkeypatch.setattr(F, "moe_router", lambda *a, **k: pytest.fail("the operator was called"))
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = (f(x, *ids) for f in (model[0], lambda *a: type(model[0]).liger_original.forward(model[0], *a)))
    assert all(map(torch.equal, found, theirs))
    with pytest.raises(TypeError):
        model[0](x, *ids, 1)


@needs_v4
def test_routers_that_are_left_alone():
    other, more = router_of(), router_of()
    other[0].score_fn = nn.ReLU()
    more[0].register_buffer("more", torch.zeros(1))
    for model, switches, reason in (
        (other, {}, "computes something else"),
        (more, {}, "has other numbers than a bias, or a table of experts, and a scale"),
        (router_of(), {"moe_router": False}, "moe_router is switched off"),
    ):
        with pytest.warns(RuntimeWarning, match="left as it is"):
            assert apply_liger_kernel(model, **switches).rows[0].reason == reason


# ---- Rotations


def rotary_functions():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    yield "pairs to halves", v3.apply_rotary_pos_emb_interleave
    if known(["deepseek_v4"]):
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

        yield "last pairs", v4.apply_rotary_pos_emb


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("kind, function", list(rotary_functions()))
def test_rotations(kind, function, unsqueeze_dim):
    found = probe.identify_rotary(function)
    assert (found.kind, found.takes_norms, found.promotes) == (kind, False, kind == "pairs to halves")
    ours, size = modules.rotary_function(found, function), 16 if kind == "last pairs" else 8
    shapes = [(2, 3, 5, size), (2, 1, 5, size)][: found.tensors]
    x = [torch.randn(s).transpose(1, unsqueeze_dim).requires_grad_() for s in shapes]
    upstream = [torch.randn_like(t) for t in x]
    angle = torch.randn(2, 5, 4)
    table = [torch.cat([t, t], -1) if found.tensors == 2 else t for t in (angle.cos(), angle.sin())]

    def run(f):
        outs = f(*x, *table, unsqueeze_dim=unsqueeze_dim)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return [*outs, *torch.autograd.grad(outs, x, upstream)]

    with path_taken("cpu"):
        results = run(ours)
    torch.testing.assert_close(results, run(function))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(run(compiled), results)


@needs_v4
def test_limits_beside_adapters():
    peft = pytest.importorskip("peft")
    targets = ["gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model, ids = peft.get_peft_model(tiny("deepseek_v4"), config), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model)
    assert {row.replacement for row in report.rows if row.kind == "mlp"} == {"swiglu"}
    assert_same_step(model, ids, plain)
