"""The layers that `make hub` serves: each computes what a module of transformers computes, or calls the module's own code.

These tests give modules a layer's forward as the library `kernels` does; tests/packaging/test_hub.py runs that library."""

import copy
import inspect
from importlib import import_module
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers.loss.loss_utils import ForCausalLMLoss

import liger_ops
from liger_ops.transformers import layers
from tests.support.checks import check_op, count_graphs, path_taken

DTYPES = [torch.float32, torch.bfloat16]


def modeling(model):
    return import_module(f"transformers.models.{model}.modeling_{model}")


def served(module, layer):
    """A copy of the module with the layer's forward."""
    changed = copy.deepcopy(module)
    changed.forward = MethodType(layer.forward, changed)
    return changed


def as_module(function):
    """As `kernels` makes a module of a function."""

    class Function(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    Function.forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    return Function()


def in_fp64(formula, own):
    """The formula for fp64, which modules round to fp32, and the module's own code for other dtypes."""
    return lambda x, *args: (formula if x.dtype == torch.float64 else own)(x, *args)


def llama_mlp(activation="silu"):
    config = SimpleNamespace(hidden_size=16, intermediate_size=24, mlp_bias=False, hidden_act=activation)
    return modeling("llama").LlamaMLP(config)


def leaf(*shape, dtype, scale=1.0):
    return (scale * torch.randn(shape)).to(dtype).requires_grad_()


# The weight multiplies rounded rows in Llama, and rows in fp32 in Olmo and Qwen. Qwen's weight is an offset from 1.
NORMS = [("llama", "LlamaRMSNorm", 0), ("olmo3", "Olmo3RMSNorm", 0), ("qwen3_5", "Qwen3_5RMSNorm", 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model, name, offset", NORMS)
def test_norms(model, name, offset, dtype):
    torch.manual_seed(0)
    norm = getattr(modeling(model), name)(48).to(dtype)
    ours = served(norm, layers.RMSNormZeroCentered if offset else layers.RMSNorm)

    def formula(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight + offset)

    check_op(
        lambda x, weight: functional_call(ours, {"weight": weight}, x),
        in_fp64(formula, lambda x, weight: functional_call(norm, {"weight": weight}, x)),
        [leaf(3, 5, 48, dtype=dtype), leaf(48, dtype=dtype)],
        [torch.randn(3, 5, 48).to(dtype)],
        "cpu",
    )


@pytest.mark.parametrize("model, mode", [("llama", "llama"), ("olmo3", "gemma"), ("gpt_oss", "gemma")])
def test_norms_round_where_the_module_rounds(model, mode):
    (name,) = (n for n in vars(modeling(model)) if n.endswith("RMSNorm"))
    assert layers.Norm(*layers.norm_of(getattr(modeling(model), name)(48))).casting_mode == mode


# Half-split columns; results rounded to the dtype of q; tables of half the width.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["llama", "olmo3", "gpt_oss"])
@pytest.mark.parametrize("dim", [1, 2])
def test_rotations(model, dtype, dim):
    torch.manual_seed(0)
    rotation = as_module(modeling(model).apply_rotary_pos_emb)
    angles = torch.randn(2, 5, 8) if model == "gpt_oss" else torch.randn(2, 5, 8).repeat(1, 1, 2)
    shapes = [(2, 4, 5, 16), (2, 2, 5, 16)] if dim == 1 else [(2, 5, 4, 16), (2, 5, 2, 16)]
    check_op(
        lambda *args: served(rotation, layers.rotary_pos_emb)(*args, dim),
        lambda *args: rotation(*args, dim),
        [*(leaf(*shape, dtype=dtype) for shape in shapes), angles.cos().to(dtype), angles.sin().to(dtype)],
        [torch.randn(shape).to(dtype) for shape in shapes],
        "cpu",
    )


def test_a_rotation_of_wider_tables_has_the_dtype_that_the_function_gives_it():
    q, table = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 3, 8)
    for model, dtype in (("llama", torch.float32), ("olmo3", torch.bfloat16)):
        rotation = as_module(modeling(model).apply_rotary_pos_emb)
        for module in (rotation, served(rotation, layers.rotary_pos_emb)):
            assert {t.dtype for t in module(q, q, table, table)} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layer, activation",
    [("SwiGLUMLP", "silu"), ("GeGLUMLP", "gelu_pytorch_tanh"), ("GeGLUMLP", "gelu")],
)
def test_mlps(layer, activation, dtype):
    """The module's activation decides, not the layer's name."""
    torch.manual_seed(0)
    mlp = llama_mlp(activation).to(dtype)
    names, weights = zip(*mlp.named_parameters())

    def call(module):
        return lambda x, *given: functional_call(module, dict(zip(names, given)), x)

    inputs = [leaf(2, 5, 16, dtype=dtype), *(leaf(*w.shape, dtype=dtype, scale=0.3) for w in weights)]
    check_op(call(served(mlp, getattr(layers, layer))), call(mlp), inputs, [torch.randn(2, 5, 16).to(dtype)], "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_router(dtype):
    torch.manual_seed(0)
    config = SimpleNamespace(num_experts_per_tok=2, num_experts=6, hidden_size=16)
    router = modeling("qwen3_5_moe").Qwen3_5MoeTopKRouter(config).to(dtype)
    ours = served(router, layers.SoftmaxTopKRouter)
    # One column for each expert, so that the logits of a token differ.
    weight = torch.eye(6, 16)
    x = torch.stack([torch.randperm(16) for _ in range(10)]).reshape(2, 5, 16) / 4

    def formula(x, weight):
        logits = nn.functional.linear(x.flatten(0, 1), weight)
        top = logits.softmax(-1).topk(2, -1)
        return logits, top.values / top.values.sum(-1, keepdim=True)

    def call(module):
        return lambda x, weight: functional_call(module, {"weight": weight}, x)[:2]

    inputs = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    grads_out = [torch.randn(10, n).to(dtype) for n in (6, 2)]
    check_op(call(ours), in_fp64(formula, call(router)), inputs, grads_out, "cpu")
    chosen = [functional_call(m, {"weight": weight.to(dtype)}, x.to(dtype))[2] for m in (ours, router)]
    assert torch.equal(*chosen) and chosen[0].dtype == chosen[1].dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("shifted", [False, True])
def test_loss(dtype, items, shifted):
    torch.manual_seed(0)
    labels = torch.randint(0, 11, (2, 6))
    labels[0, 3] = -100
    given = (None, 11, items, -100, labels) if shifted else (labels, 11, items)

    def formula(logits):
        target = labels if shifted else nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return total / ((target != -100).sum() if items is None else items)

    check_op(
        lambda logits: layers.ForCausalLMLoss()(logits, *given, unknown=1),
        in_fp64(formula, lambda logits: ForCausalLMLoss(logits, *given)),
        [leaf(2, 6, 11, dtype=dtype)],
        [torch.tensor(1.5)],
        "cpu",
    )


# ---- Modules of a served name that compute something else.


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).clamp(-1, 1) * self.weight


def translation(q, k, cos, sin, unsqueeze_dim=1):
    return q + cos.unsqueeze(unsqueeze_dim), k + sin.unsqueeze(unsqueeze_dim)


def laguna_router():
    config = modeling("laguna").LagunaConfig(num_experts=6, num_experts_per_tok=2, hidden_size=16)
    router = modeling("laguna").LagunaTopKRouter(config)
    nn.init.normal_(router.weight)
    return router


OTHERS = {
    "norm": (Clamped, layers.RMSNorm, lambda: [torch.randn(3, 8)]),
    "rotation": (
        lambda: as_module(translation),
        layers.rotary_pos_emb,
        lambda: [torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)],
    ),
    "router": (laguna_router, layers.SoftmaxTopKRouter, lambda: [torch.randn(2, 5, 16)]),
    "mlp": (lambda: llama_mlp("relu"), layers.SwiGLUMLP, lambda: [torch.randn(2, 5, 16)]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_modules_run_their_own_code(kind):
    make, layer, inputs = OTHERS[kind]
    module, given = make(), inputs()
    changed = served(module, layer)
    changed(*given)  # probes it
    liger_ops.reset_launch_counts()
    ours, theirs = changed(*given), module(*given)
    assert not any(liger_ops.launch_counts().values())
    for a, b in zip(ours, theirs) if isinstance(ours, tuple) else [(ours, theirs)]:
        assert torch.equal(a, b)


# ---- What `kernels` demands, and torch.compile.


@pytest.mark.parametrize("name", layers.__all__)
def test_a_layer_has_no_members_of_its_own(name):
    layer = getattr(layers, name)
    assert layer.__init__ is nn.Module.__init__
    of_module = {member for member, _ in inspect.getmembers(nn.Module)}
    assert {member for member, _ in inspect.getmembers(layer)} - of_module == {"can_torch_compile", "has_backward"}
    assert layer.can_torch_compile and layer.has_backward


class Block(nn.Module):
    """Modules of every kind, of which none has run."""

    def __init__(self):
        super().__init__()
        routing = SimpleNamespace(num_experts_per_tok=2, num_experts=4, hidden_size=16)
        self.norm = served(modeling("llama").LlamaRMSNorm(16), layers.RMSNorm)
        self.mlp = served(llama_mlp(), layers.SwiGLUMLP)
        self.router = served(modeling("qwen3_5_moe").Qwen3_5MoeTopKRouter(routing), layers.SoftmaxTopKRouter)
        nn.init.normal_(self.router.weight)
        self.rotate = served(as_module(modeling("llama").apply_rotary_pos_emb), layers.rotary_pos_emb)

    def forward(self, x, cos, sin):
        y = self.mlp(self.norm(x))
        q, k = self.rotate(y.unsqueeze(1), x.unsqueeze(1), cos, sin)
        logits, weights, _ = self.router(y)
        return layers.ForCausalLMLoss()(q + k, x[..., 0].long(), 16) + weights.square().sum() + logits.mean()


@pytest.mark.library
def test_layers_are_traced_into_one_graph_although_none_has_been_probed():
    torch.manual_seed(0)
    backend, graphs = count_graphs()
    block = Block()
    inputs = torch.rand(2, 5, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with path_taken("cpu"):
        loss = compiled(*inputs)
        loss.backward()
    grads = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    expected = block(*inputs)
    expected.backward()
    assert len(graphs) == 1 and torch.equal(loss, expected)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, block.parameters()))
    names = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert {f"liger.{op}" for op in ("rms_norm", "rope", "moe_router", "cross_entropy")} <= {
        ".".join(name.split(".")[:2]) for name in names
    }


def test_changes_after_the_first_call():
    torch.manual_seed(0)
    mlp, x, seen = llama_mlp(), torch.randn(3, 16), []
    ours = served(mlp, layers.SwiGLUMLP)
    with path_taken("cpu"):
        torch.testing.assert_close(ours(x), mlp(x))
    handle = ours.act_fn.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(ours(x), mlp(x)) and seen
    handle.remove()
    mlp.act_fn = ours.act_fn = nn.ReLU()
    assert torch.equal(ours(x), mlp(x))


def test_autocast_does_not_disturb_the_probes():
    norm = served(modeling("llama").LlamaRMSNorm(16), layers.RMSNorm)
    mlp = served(llama_mlp(), layers.SwiGLUMLP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mlp(norm(torch.randn(3, 16)))
    assert layers.norm_of(norm) is not None and layers.mlp_of(mlp) is not None
