"""liger_ops.nn compared with torch.nn: constructors, state_dict, results, gradients and compilation."""

import copy
import inspect

import pytest
import torch
from torch import nn

import liger_ops.nn as ours
from liger_ops import functional
from tests.support.checks import assert_no_worse, count_graphs, record_calls

NORMS = [
    (ours.RMSNorm, nn.RMSNorm, dict(normalized_shape=24)),
    (ours.RMSNorm, nn.RMSNorm, dict(normalized_shape=[3, 8], eps=1e-3)),
    (ours.RMSNorm, nn.RMSNorm, dict(normalized_shape=24, elementwise_affine=False)),
    (ours.LayerNorm, nn.LayerNorm, dict(normalized_shape=24)),
    (ours.LayerNorm, nn.LayerNorm, dict(normalized_shape=(3, 8), eps=1e-3)),
    (ours.LayerNorm, nn.LayerNorm, dict(normalized_shape=24, bias=False)),
    (ours.LayerNorm, nn.LayerNorm, dict(normalized_shape=24, elementwise_affine=False)),
]
SMALL = 1e-3 * torch.randn(4, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rms_norm_has_the_defaults_of_torch_and_not_of_the_function(dtype):
    # So small that torch's eps, which is that of the dtype, shows.
    x = (SMALL.double() * (1e-4 if dtype == torch.float64 else 1.0)).to(dtype)
    weight = (1 + SMALL[0]).to(dtype)
    as_torch, as_function = ours.RMSNorm(24, dtype=dtype), ours.RMSNorm(24, eps=1e-6, casting_mode="llama", dtype=dtype)
    for norm in (as_torch, as_function):
        norm.load_state_dict({"weight": weight})
    with torch.no_grad():
        torch.testing.assert_close(as_torch(x), nn.functional.rms_norm(x, (24,), weight))
        assert torch.equal(as_function(x), functional.rms_norm(x, weight))
        assert float((as_torch(x) - as_function(x)).abs().max()) > 0.1


REDUCTIONS = ["mean", "sum", "none"]


def randomised(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


def results(module, *inputs):
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = module(*inputs)
    out = torch.stack(out) if isinstance(out, tuple) else out
    wanted = [x for x in inputs if x.requires_grad] + list(module.parameters())
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def agree(module, theirs, *inputs):
    exact = results(copy.deepcopy(theirs).double(), *(x.double() if x.is_floating_point() else x for x in inputs))
    for i, (a, b, c) in enumerate(zip(results(module, *inputs), results(theirs, *inputs), exact)):
        assert_no_worse(f"result {i}", a, b, c, scale=1.0)


@pytest.mark.parametrize("cls, counterpart, arguments", NORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_their_counterparts(cls, counterpart, arguments, dtype, device):
    theirs = randomised(counterpart(**arguments, device=device, dtype=dtype))
    module = cls(**arguments, device=device, dtype=dtype)
    module.load_state_dict(theirs.state_dict())
    assert isinstance(module, counterpart) and repr(module) == repr(theirs)
    shape = arguments["normalized_shape"]
    agree(module, theirs, torch.randn(5, *([shape] if isinstance(shape, int) else shape), device=device, dtype=dtype))


@pytest.mark.parametrize("cls, counterpart", [(ours.RMSNorm, nn.RMSNorm), (ours.LayerNorm, nn.LayerNorm),
                                              (ours.CrossEntropyLoss, nn.CrossEntropyLoss)])  # fmt: skip
def test_constructors_extend_their_counterparts(cls, counterpart):
    mine, theirs = (list(inspect.signature(c).parameters.values()) for c in (cls, counterpart))
    assert [(p.name, p.default) for p in mine[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in mine[len(theirs) :])


X, TARGET, PER_CLASS, PER_TOKEN = torch.ones(6, 16), torch.zeros(6, dtype=torch.long), torch.ones(16), torch.ones(6)
OF_NORMS = dict(eps=0.5, offset=1.0, casting_mode="none")
OF_LOSSES = dict(reduction="sum", ignore_index=3, label_smoothing=0.1, lse_square_scale=0.2, softcap=0.5)
OF_LINEAR_LOSSES = dict(OF_LOSSES, ce_weight=PER_CLASS, logits_scale=0.5, memory_budget=1 << 20)

# operator -> (module class, sizes, options, call arguments)
MODULES = {
    "rms_norm": (ours.RMSNorm, [16], OF_NORMS, dict(x=X)),
    "fused_add_rms_norm": (ours.FusedAddRMSNorm, [16], OF_NORMS, dict(x=X, residual=X + 1)),
    "rms_norm_gated": (
        ours.RMSNormGated,
        [16],
        dict(OF_NORMS, activation="sigmoid", gate_first=True, group_size=8),
        dict(x=X, gate=X + 1),
    ),
    "layer_norm": (ours.LayerNorm, [16], dict(eps=0.5), dict(x=X)),
    "embedding": (ours.Embedding, [7, 16], dict(padding_idx=3), dict(input=TARGET)),
    "cross_entropy": (ours.CrossEntropyLoss, [], dict(OF_LOSSES, weight=PER_CLASS), dict(logits=X, target=TARGET)),
    "fused_linear_cross_entropy": (
        ours.FusedLinearCrossEntropyLoss,
        [],
        OF_LINEAR_LOSSES,
        dict(
            input=X,
            weight=X + 1,
            target=TARGET,
            bias=PER_CLASS + 1,
            token_weight=PER_TOKEN,
            low_rank_input=X + 2,
            low_rank_weight=X + 3,
        ),  # fmt: skip
    ),
}


@pytest.mark.parametrize("operator", MODULES)
def test_options_reach_the_operator(operator, monkeypatch):
    cls, sizes, options, inputs = MODULES[operator]
    module, calls = cls(*sizes, **options), record_calls(monkeypatch, operator, X)
    module(*inputs.values())
    # dict equality compares tensors by identity first, so these must be the same objects.
    assert calls == [inputs | dict(module.named_parameters()) | options]


def test_a_norm_names_the_expected_shape():
    with pytest.raises(ValueError, match=r"RMSNorm: input must have shape \[\.\.\., 3, 8\] \(got \[8, 3\]\)"):
        ours.RMSNorm([3, 8])(torch.zeros(8, 3))


def test_with_an_offset_the_initial_scale_is_one():
    x = torch.randn(4, 16)
    shifted, plain = ours.RMSNorm(16, offset=1.0), ours.RMSNorm(16)
    assert not shifted.weight.any() and "offset=1.0" in repr(shifted)
    assert torch.equal(shifted(x), plain(x))
    with torch.no_grad():
        shifted.weight.fill_(3.0)
    shifted.reset_parameters()
    assert not shifted.weight.any()


def test_fused_add_is_add_then_norm():
    x, residual = torch.randn(2, 4, 16)
    norm, fused = randomised(ours.RMSNorm(16, eps=1e-6)), ours.FusedAddRMSNorm(16, eps=1e-6)
    fused.load_state_dict(norm.state_dict())
    y, s = fused(x, residual)
    assert torch.equal(s, x + residual) and torch.equal(y, norm(s))


class Reference(nn.Module):
    def __init__(self, mlp, activation):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


# A projection with a hook must be called as a module, so that the hook runs.
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "cls, options, activation",
    [
        (ours.SwiGLUMLP, {}, nn.SiLU()),
        (ours.GEGLUMLP, {}, nn.GELU("tanh")),
        (ours.GEGLUMLP, {"approximate": "none"}, nn.GELU()),
    ],
)
def test_gated_mlps(cls, options, activation, bias, hooked, device):
    mlp = cls(16, 40, bias, device=device, **options)
    if hooked:
        mlp.down_proj.register_forward_hook(lambda *_: None)
    theirs = Reference(mlp, activation)
    assert list(mlp.state_dict()) == list(theirs.state_dict())
    agree(mlp, theirs, torch.randn(3, 5, 16, device=device))
    before = mlp.up_proj.weight.clone()
    mlp.reset_parameters()
    assert not torch.equal(before, mlp.up_proj.weight) and "hidden_size=16, intermediate_size=40" in repr(mlp)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 7, 3), (2, 7, 3, 4)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_equals_its_counterpart(shape, reduction, device):
    options = dict(reduction=reduction, label_smoothing=0.1, ignore_index=2)
    weight = torch.rand(7, device=device) + 0.5
    theirs, module = nn.CrossEntropyLoss(weight, **options), ours.CrossEntropyLoss(weight, **options)
    assert list(module.state_dict()) == list(theirs.state_dict())
    logits = torch.randn(shape, device=device)
    target = torch.randint(7, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    if len(shape) == 1:
        target.fill_(1)
    agree(module, theirs, logits, target)


def test_probability_targets_use_torch():
    logits, target = torch.randn(3, 7), torch.rand(3, 7).softmax(-1)
    assert torch.equal(ours.CrossEntropyLoss()(logits, target), nn.CrossEntropyLoss()(logits, target))
    with pytest.raises(ValueError, match="target must hold class indices"):
        ours.CrossEntropyLoss(softcap=3.0)(logits, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fused_linear_cross_entropy_equals_a_linear_layer_and_a_loss(reduction, device):
    x, target = torch.randn(2, 9, 16, device=device), torch.randint(33, (2, 9), device=device)
    target[0, :4] = -100
    head = nn.Linear(16, 33, device=device)
    loss = ours.FusedLinearCrossEntropyLoss(reduction=reduction, label_smoothing=0.1, logits_scale=0.5)
    assert repr(loss).startswith("FusedLinearCrossEntropyLoss(") and "label_smoothing=0.1" in repr(loss)
    plain = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, x):
            return loss(x, self.head.weight, target, self.head.bias)

    class Plain(Fused):
        def forward(self, x):
            return plain((self.head(x) * 0.5).movedim(-1, 1), target)

    agree(Fused(), Plain(), x)


def test_modules_compile_into_one_graph():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.add, self.mlp = ours.LayerNorm(16), ours.FusedAddRMSNorm(16), ours.SwiGLUMLP(16, 24)
            self.head, self.loss = nn.Linear(16, 11), ours.CrossEntropyLoss()

        def forward(self, x, target):
            y, s = self.add(self.first(x), x)
            return self.loss(self.head(s + self.mlp(y)), target)

    block = Block()
    backend, graphs = count_graphs()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 9):
        x, target = torch.randn(rows, 16), torch.randint(11, (rows,))
        torch.testing.assert_close(compiled(x, target), block(x, target))
    assert len(graphs) == 1


def scripted_calls():
    x, logits, target, weights = torch.randn(5, 24), torch.randn(5, 11), torch.randint(11, (5,)), torch.rand(11)
    yield ours.RMSNorm(24), x
    yield ours.RMSNorm([3, 8], eps=1e-3, offset=1.0), x.view(5, 3, 8)
    yield ours.RMSNorm(24, elementwise_affine=False), x.double()
    yield ours.FusedAddRMSNorm([3, 8]), x.view(5, 3, 8), x.view(5, 3, 8) + 1
    yield ours.RMSNormGated([3, 8], group_size=8), x.view(5, 3, 8), x.view(5, 3, 8) + 1
    yield ours.LayerNorm(24), x
    yield ours.LayerNorm((3, 8), bias=False), x.view(5, 3, 8)
    yield ours.Embedding(11, 24, padding_idx=1), target
    yield ours.SwiGLUMLP(24, 40, bias=True), x
    yield ours.GEGLUMLP(24, 40, approximate="none"), x
    yield ours.CrossEntropyLoss(label_smoothing=0.1), logits.t().expand(2, 11, 5), target.expand(2, 5)
    yield ours.CrossEntropyLoss(weights, reduction="none", lse_square_scale=0.1, softcap=5.0), logits, target
    yield ours.CrossEntropyLoss(weights, reduction="sum"), logits, logits.softmax(-1)
    yield ours.FusedLinearCrossEntropyLoss(), x, torch.randn(11, 24), target
    options = dict(reduction="sum", softcap=5.0, logits_scale=0.5, memory_budget=1 << 20)
    yield ours.FusedLinearCrossEntropyLoss(weights, **options), x, torch.randn(11, 24), target, torch.randn(11)
    yield ours.LinearLossHead(24, 11), x
    yield ours.LinearLossHead(24, 11, bias=False), x, target


def test_every_module_can_be_scripted():
    modules = {cls for cls in (getattr(ours, name) for name in ours.__all__) if isinstance(cls, type)}
    for module, *inputs in scripted_calls():
        scripted = torch.jit.script(module)
        modules.discard(type(module))
        torch.testing.assert_close(results(scripted, *inputs), results(module, *inputs))
    assert not modules


def test_a_scripted_norm_names_the_expected_shape():
    with pytest.raises(torch.jit.Error, match=r"LayerNorm: input must have shape \[\.\.\., 3, 8\] \(got \[8, 3\]\)"):
        torch.jit.script(ours.LayerNorm([3, 8]))(torch.zeros(8, 3))
