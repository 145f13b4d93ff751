"""liger_ops.linear.project: projections of one input agree with separate calls, and their input gradients add up."""

import pytest
import torch
from torch import nn

from liger_ops.linear import project as projections
from liger_ops.linear.layers import has_hooks, is_bare_linear
from liger_ops.linear.project import project
from tests.support.checks import assert_no_worse, count_graphs

pytestmark = pytest.mark.usefixtures("as_large_models")


def linears(device="cpu", dtype=torch.float32, bias=(True, False, True), sizes=(8, 4, 4)):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(6, n, b, device, dtype) for n, b in zip(sizes, bias))


def input_of(*shape, device="cpu", dtype=torch.float32, requires_grad=True):
    return torch.randn(*shape, 6, device=device, dtype=dtype).requires_grad_(requires_grad)


def gradients(outputs, wanted, **options):
    loss = sum((y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum() for y in outputs)
    return torch.autograd.grad(loss, wanted, **options)


def is_shared(outputs) -> bool:
    nodes = {y.grad_fn for y in outputs}
    return len(nodes) == 1 and type(next(iter(nodes))).__name__ == "_ProjectionsBackward"


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients(shape, dtype, device):
    modules, x = linears(device, dtype), input_of(*shape, device=device, dtype=dtype)
    wide = linears(device, torch.float64)
    wide.load_state_dict(modules.state_dict())
    precise = x.detach().double().requires_grad_()
    exact = gradients([m(precise) for m in wide], [precise, *wide.parameters()])
    plain = [m(x) for m in modules]
    shared = project(modules, x)
    assert is_shared(shared) and all(torch.equal(a, b) for a, b in zip(shared, plain))
    wanted = [x, *modules.parameters()]
    for i, results in enumerate(zip(gradients(shared, wanted), gradients(plain, wanted), exact)):
        assert_no_worse(f"gradient {i}", *results, scale=1.0)


@pytest.mark.parametrize("frozen", ["weights", "input", "one"])
def test_only_required_gradients_are_computed(frozen):
    modules, x = linears(), input_of(5, requires_grad=frozen != "input")
    modules[0 if frozen == "one" else slice(None)].requires_grad_(frozen not in ("weights", "one"))
    outputs = project(modules, x)
    # A frozen input needs no gradient, so nothing accumulates.
    assert is_shared(outputs) == (frozen != "input")
    wanted = [t for t in (x, *modules.parameters()) if t.requires_grad]
    for a, b in zip(gradients(outputs, wanted), gradients([m(x) for m in modules], wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_unused_outputs_contribute_no_gradient(used):
    modules, x = linears(), input_of(5)
    (shared,) = gradients([project(modules, x)[used]], [x])
    torch.testing.assert_close(shared, gradients([modules[used](x)], [x])[0])


def test_upstream_gradients_are_not_modified():
    """The GEMMs accumulate in place, but not into a tensor that a hook may hold."""
    modules, x = linears(), input_of(5)
    grads = [torch.randn(5, m.out_features) for m in modules]
    kept = [g.clone() for g in grads]
    (dx,) = torch.autograd.grad(project(modules, x), x, grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept))
    torch.testing.assert_close(dx, sum(g @ m.weight for g, m in zip(kept, modules)))


def test_double_backward():
    modules, x = linears(dtype=torch.float64), input_of(3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: project(modules, x), x)


def wrapped(modules):
    class Wrapper(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    modules[1] = Wrapper(6, 4)


def hooked(modules):
    modules[1].register_forward_hook(lambda m, i, o: o * 2)


def replaced(modules):
    modules[1].forward = lambda x: x[..., :4] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_projection_uses_our_gemm_if_tiles_can_be_chosen(dtype, device):
    (module,), x = linears(device, dtype, (False,), (8,)), input_of(2, 5, device=device, dtype=dtype)
    (output,) = project((module,), x)
    assert is_shared([output]) == (device == "cuda" and dtype == torch.bfloat16)
    wanted = [x, module.weight]
    for a, b in zip([output, *gradients([output], wanted)], [module(x), *gradients([module(x)], wanted)], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("change", [wrapped, hooked, replaced])
def test_hooks_and_wrappers_of_a_projection_are_called(change):
    modules, x = linears(), input_of(5)
    change(modules)
    assert has_hooks(modules[1]) == (change is hooked) and not is_bare_linear(modules[1])
    outputs = project(modules, x)
    assert not is_shared(outputs) and all(torch.equal(a, m(x)) for a, m in zip(outputs, modules))


def test_autocast_and_inference_call_the_modules():
    modules, x = linears(), input_of(5)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = project(modules, x)
    assert not is_shared(outputs) and all(y.dtype == torch.bfloat16 for y in outputs)
    with torch.no_grad():
        assert not any(y.requires_grad for y in project(modules, x))


def test_backward_may_run_inside_autocast():
    """As in linear layers, backward then computes in bf16, but the gradients keep the dtype of the parameters."""
    modules, x = linears(), input_of(5)
    wanted = [x, *modules.parameters()]
    shared, plain = project(modules, x), [m(x) for m in modules]
    exact = gradients(plain, wanted, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients(shared, wanted), gradients(plain, wanted), exact
        product = torch.ops.liger._mm(x, x.t())
    for i, (ours, theirs, truth) in enumerate(zip(*results)):
        assert_no_worse(f"gradient {i}", ours, theirs, truth)
    assert product.dtype == torch.float32


def test_function_transforms_differentiate_every_projection():
    modules, x = linears(), input_of(4, requires_grad=False)
    per_row = torch.vmap(torch.func.grad(lambda row: sum(y.sum() for y in project(modules, row[None]))))(x)
    torch.testing.assert_close(per_row, sum(m.weight.sum(0) for m in modules).expand(4, 6))


def test_small_inputs_are_left_to_autograd(monkeypatch):
    monkeypatch.setattr(projections, "LARGE", 31)
    modules = linears()
    assert not is_shared(project(modules, input_of(5))) and is_shared(project(modules, input_of(6)))


def test_compile_makes_one_graph():
    modules = linears()
    backend, graphs = count_graphs()
    compiled = torch.compile(lambda x: project(modules, x), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 8):
        x = input_of(2, rows)
        wanted = [x, *modules.parameters()]
        shared = gradients(compiled(x), wanted)
        for a, b in zip(shared, gradients([m(x) for m in modules], wanted), strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


def test_the_private_operator(device):
    torch.manual_seed(0)
    grads = [torch.randn(5, n, device=device) for n in (8, 4)]
    weights = [torch.randn(n, 6, device=device) for n in (8, 4)]
    op = torch.ops.liger._projections_grad
    kept = [t.clone() for t in grads + weights]
    torch.testing.assert_close(op(grads, weights), grads[0] @ weights[0] + grads[1] @ weights[1])
    assert all(torch.equal(a, b) for a, b in zip(grads + weights, kept))
    with pytest.raises(RuntimeError, match="_projections_grad: grads and weights must have equal, non-zero length"):
        op(grads, weights[:1])
