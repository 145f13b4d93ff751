"""Compiled autograd: the backward of eager calls is traced, and similar calls share one compiled graph."""

from contextlib import contextmanager

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from tests.support.calls import ROWS, RowModule, inputs_of, outputs
from tests.support.rows import PLAIN, in_tiers


@contextmanager
def compiled(backend=None):
    """Yields a list to which each traced backward adds the names of its operators. Fails if no backward was traced."""
    traced = []

    def record(graph, inputs):
        traced.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    compiler = torch.compile(backend=backend or aot_autograd(fw_compiler=record), fullgraph=True)
    with compiled_autograd._enable(compiler):
        yield traced
    assert captures()


def captures() -> int:
    return counters["compiled_autograd"]["captures"]


def ours(names) -> list[str]:
    return [name.split(".")[1] for name in names if name.startswith("liger.")]


def backward(module, inputs):
    """The .grad of every tensor that requires one, after .backward()."""
    leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    results = [r for r in outputs(module(*inputs)) if r.requires_grad]
    sum((r * r).sum() for r in results).backward()
    return [leaf.grad for leaf in leaves]


def close(mine, theirs) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@in_tiers(PLAIN, one_of=4)
def test_gradients_of_every_operator(row, device):
    module, inputs = RowModule(row).to(device), inputs_of(row, 2, 5, device, requires_grad=True)
    wanted = backward(module, inputs)
    with compiled() as traced:
        close(backward(module, inputs), wanted)
    assert captures() == 1
    assert ours(traced[0])


@pytest.mark.thorough
def test_inductor(device):
    for row in [row for row in ROWS if row.op in ("rms_norm", "layer_norm")][::2]:
        module, inputs = RowModule(row).to(device), inputs_of(row, 2, 5, device, requires_grad=True)
        wanted = backward(module, inputs)
        with compiled("inductor"):
            close(backward(module, inputs), wanted)


def check_compiled(gradients, *calls) -> None:
    """Of functions that return gradients. calls: arguments of each call."""
    wanted = [gradients(*arguments) for arguments in calls]
    with compiled():
        for arguments, expected in zip(calls, wanted):
            close(gradients(*arguments), expected)


def test_similar_calls_share_a_compiled_graph(device):
    def chain(x, weight, offset):
        return torch.ops.liger.rms_norm(torch.ops.liger.rms_norm(x, weight, 1e-6, offset), weight, 1e-6, offset)

    def gradients(offset):
        torch.manual_seed(round(10 * offset))
        x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((3, 16), (16,)))
        chain(x, weight, offset).square().sum().backward()
        return x.grad, weight.grad

    offsets = [0.0, 0.5, 0.0, 0.5, 1.0, 0.5]
    check_compiled(gradients, *([offset] for offset in offsets))
    assert captures() == len(set(offsets))


def test_other_sections_have_another_graph(device):
    def gradients(sections):
        torch.manual_seed(0)
        q, k = (torch.randn(1, heads, 3, 8, device=device, requires_grad=True) for heads in (2, 1))
        cos, sin = torch.randn(2, 3, 1, 3, 8, device=device)
        out = torch.ops.liger.rope(q, k, cos, sin, mrope_section=sections)
        sum(t.square().sum() for t in out).backward()
        return q.grad, k.grad

    check_compiled(gradients, [[1, 1, 2]], [[2, 1, 1]])
    assert captures() == 2


def test_changing_sizes(device):
    def gradients(rows):
        torch.manual_seed(rows)
        x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((rows, 16), (16,)))
        torch.ops.liger.rms_norm(x, weight).square().sum().backward()
        return x.grad, weight.grad

    check_compiled(gradients, [3], [5], [9], [4])
    assert captures() <= 2


def test_gradients_that_are_not_required(device):
    def gradients(*names):
        torch.manual_seed(0)
        leaves = {k: torch.randn(s, device=device) for k, s in (("x", (3, 16)), ("weight", (16,)), ("bias", (16,)))}
        for name in names:
            leaves[name].requires_grad_()
        torch.ops.liger.layer_norm(**leaves).square().sum().backward()
        return [leaves[name].grad for name in names]

    subsets = [("x",), ("weight",), ("bias",), ("x", "bias"), ("x", "weight", "bias")]
    check_compiled(gradients, *subsets)
    assert captures() == len(subsets)


@pytest.mark.parametrize("used", [0, 1])
def test_unused_results(used, device):
    def gradients():
        torch.manual_seed(0)
        x, residual, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((3, 16), (3, 16), (16,)))
        torch.ops.liger.fused_add_rms_norm(x, residual, weight)[used].square().sum().backward()
        return [t.grad for t in (x, residual) if t.grad is not None]

    check_compiled(gradients, [])


def test_saved_tensor_hooks(device):
    def gradients():
        torch.manual_seed(0)
        gate, up = (torch.randn(3, 16, device=device, requires_grad=True) for _ in range(2))
        with saved_tensors_hooks(torch.Tensor.double, torch.Tensor.float):
            out = torch.ops.liger.swiglu(gate, up)
        out.square().sum().backward()
        return gate.grad, up.grad

    check_compiled(gradients, [])


def test_second_backward_through_a_retained_graph(device):
    def gradients():
        torch.manual_seed(0)
        x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((6, 16), (20, 16)))
        target = torch.arange(6, device=device)
        loss = torch.ops.liger.fused_linear_cross_entropy(x, weight, target)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, weight.grad

    check_compiled(gradients, [])


def test_a_forward_with_graph_breaks(device):
    """Parts of forward are compiled, others run eagerly, and a single backward covers both."""
    torch.manual_seed(0)
    norm, head = (
        torch.ones(16, device=device, requires_grad=True),
        torch.randn(20, 16, device=device, requires_grad=True),
    )
    x, target = torch.randn(6, 16, device=device, requires_grad=True), torch.arange(6, device=device)

    def step():
        hidden = torch.ops.liger.rms_norm(x, norm)
        torch._dynamo.graph_break()
        loss = torch.compiler.disable(torch.ops.liger.fused_linear_cross_entropy)(hidden * 2, head, target)
        loss.backward()

    def gradients(step):
        for leaf in (x, norm, head):
            leaf.grad = None
        step()
        return x.grad, norm.grad, head.grad

    wanted = gradients(step)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        close(gradients(torch.compile(step, backend="aot_eager")), wanted)
    assert captures() == 1
