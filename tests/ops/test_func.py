"""torch.func on every operator: vmap, per-sample gradients, and clear errors for unsupported derivatives."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.utils._pytree import tree_leaves

from liger_ops.reference import operators
from tests.support.calls import ROWS, VOCABULARY, WIDTH, RowModule, inputs_of, is_constant, outputs
from tests.support.checks import distance
from tests.support.rows import each_row, in_tiers

EXAMPLES = 3
# Without in-place ops: vmap cannot apply them to unbatched tensors.
batched_cases = in_tiers([row for row in ROWS if not row.op.endswith("_")])


def close(ours, theirs) -> None:
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        # Batched GEMMs sum in another order: both errors grow with the root of the terms, here at most all
        # elements of a weight. Where terms cancel, the error of the largest remains.
        if a.is_floating_point():
            eps = torch.finfo(a.dtype).eps
            assert a.dtype == b.dtype and distance(a, b, scale=1.0) <= 2 * (VOCABULARY * WIDTH) ** 0.5 * eps
        else:
            assert torch.equal(a, b)


def batch_of(row, device, in_dim=0):
    """EXAMPLES inputs of the row stacked along in_dim, and the inputs one by one."""
    made = [inputs_of(row, 2, 5, device) for _ in range(EXAMPLES)]
    return tuple(torch.stack(tensors, in_dim) for tensors in zip(*made)), made


def stacked(results):
    return tuple(torch.stack(r) for r in zip(*map(outputs, results)))


@pytest.fixture
def no_request_for_rules(capfd):
    """PyTorch asks for a rule, as a Python warning or on stderr, where it has to run an operator once per example itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        yield
    assert "There is a performance drop" not in capfd.readouterr().err


@batched_cases
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.usefixtures("no_request_for_rules")
def test_vmap(row, in_dim, device):
    module = RowModule(row).to(device)
    together, alone = batch_of(row, device, in_dim)
    close(vmap(module, in_dims=in_dim)(*together), stacked([module(*inputs) for inputs in alone]))


@batched_cases
def test_vmap_over_the_first_input_only(row, device):
    module = RowModule(row).to(device)
    (first, *_), alone = batch_of(row, device)
    rest = alone[0][1:]
    ours = vmap(module, in_dims=(0, *[None] * len(rest)))(first, *rest)
    close(ours, stacked([module(inputs[0], *rest) for inputs in alone]))


def test_batching_rules_make_one_call(device):
    of_rows = {name for name, operator in operators().items() if operator.rows and not is_constant(operator)}
    ruled = [row for row in ROWS if row.op in of_rows]
    assert {row.op for row in ruled} == of_rows
    for row in ruled:
        module, (together, _) = RowModule(row).to(device), batch_of(row, device)
        with torch.profiler.profile() as profile:
            vmap(module)(*together)
        (calls,) = [e.count for e in profile.key_averages() if e.key == f"liger::{row.op}"]
        # That of vmap, and the one that its rule makes for all examples.
        assert calls == 2, row.op


def test_batched_parameters(device):
    x, w, b = (torch.randn(EXAMPLES, *shape, device=device) for shape in ((4, 8), (8,), (8,)))
    ours = vmap(torch.ops.liger.layer_norm)(x, w, b)
    close(ours, torch.stack([torch.ops.liger.layer_norm(*one) for one in zip(x, w, b)]))


def test_scalar_samples_are_refused(device):
    with pytest.raises(RuntimeError, match="rms_norm: x must have at least one dimension"):
        vmap(torch.ops.liger.rms_norm)(torch.randn(EXAMPLES, device=device))


def weighted(module):
    """A scalar loss that depends nonlinearly on every differentiable result."""

    def loss(parameters, *inputs):
        result = [r for r in outputs(functional_call(module, parameters, inputs)) if r.is_floating_point()]
        return sum((r * r * torch.arange(r.numel(), device=r.device).view(r.shape)).sum() for r in result)

    return loss


@batched_cases
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.usefixtures("no_request_for_rules")
def test_per_sample_gradients(row, in_dim, device):
    module = RowModule(row).to(device)
    parameters = {k: v.detach() for k, v in module.named_parameters()}
    together, alone = batch_of(row, device, in_dim)
    differentiable = tuple(i + 1 for i, t in enumerate(together) if t.is_floating_point())[:1]
    gradient = grad(weighted(module), argnums=(0, *differentiable))
    of_parameters, *of_input = vmap(gradient, in_dims=(None, *[in_dim] * len(together)))(parameters, *together)
    one_by_one = [gradient(parameters, *inputs) for inputs in alone]
    for i, ours in enumerate(of_input, 1):
        close(ours, torch.stack([gradients[i] for gradients in one_by_one]))
    for name in parameters:
        close(of_parameters[name], torch.stack([gradients[0][name] for gradients in one_by_one]))


@each_row
def test_batched_gradients(row, device):
    """jacobian(vectorize=True) batches incoming gradients. Backward must not overwrite such tensors."""
    module = RowModule(row).to(device)
    inputs = inputs_of(row, 2, 5, device, requires_grad=True)
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]

    def results():
        return [y for y in outputs(module(*(t * 1 if t.requires_grad else t for t in inputs))) if y.requires_grad]

    upstream = [torch.randn(EXAMPLES, *y.shape, device=device) for y in results()]
    # PyTorch's batching here knows no lists, which the backward of fp8_linear takes.
    if Sequence[Tensor] in operators()[row.op].types.values() or row.op == "fp8_linear":
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            torch.autograd.grad(results(), wanted, upstream, is_grads_batched=True)
        return
    alone = [torch.autograd.grad(results(), wanted, one) for one in zip(*upstream)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        ours = torch.autograd.grad(results(), wanted, upstream, is_grads_batched=True)
    close(ours, stacked(alone))


def test_jacobian(device):
    x, w = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    ours = jacrev(lambda x: torch.ops.liger.rms_norm(x, w))(x)
    theirs = torch.autograd.functional.jacobian(lambda x: torch.ops.liger.rms_norm(x, w), x)
    close(ours, theirs)


@each_row
def test_second_derivatives_are_refused(row, device):
    module = RowModule(row).to(device)
    parameters, inputs = dict(module.named_parameters()), inputs_of(row, 1, 2, device)
    # If no input is differentiable, differentiates the parameters.
    first = next((i + 1 for i, t in enumerate(inputs) if t.is_floating_point()), 0)
    gradient = grad(weighted(module), argnums=first)
    with pytest.raises(
        RuntimeError, match="derivative for liger::_.* is not implemented|double backward is not supported"
    ):
        grad(lambda *a: sum(g.square().sum() for g in tree_leaves(gradient(*a))), argnums=first)(parameters, *inputs)


def test_hessian_is_refused(device):
    with pytest.raises(
        RuntimeError, match="Trying to use forward AD with liger::_rms_norm_fwd that does not support it"
    ):
        hessian(lambda x: torch.ops.liger.rms_norm(x).sum())(torch.randn(2, 8, device=device))


def test_private_operators_refuse_differentiation():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("liger::_")]
    schemas = {n: torch._C._get_schema(n, "") for n in names}
    with_tensors = [n for n, s in schemas.items() if any("Tensor" in str(a.type) for a in s.arguments)]
    assert with_tensors and all(torch._C._dispatch_has_kernel_for_dispatch_key(n, "Autograd") for n in with_tensors)
