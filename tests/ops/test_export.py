"""torch.export of every operator: inference and training graphs, dynamic batch and sequence, saved and loaded."""

import pytest
import torch
from torch.export import Dim, export
from torch.export.experimental import _export_forward_backward

from liger_ops.doctor.installation import operators
from liger_ops.reference import operators as declared
from tests.support.calls import ROWS, RowModule, inputs_of, outputs
from tests.support.checks import forked_output_of
from tests.support.host.cpp_example import example
from tests.support.operator_calls import ALIASES, WITHOUT_GRADIENTS
from tests.support.rows import FIRST, NAME_OF, PLAIN, in_tiers

# Strict mode traces the Python code around the operator, which is the same for every row.
in_both_modes = pytest.mark.parametrize(
    "row, strict",
    [
        pytest.param(row, strict, id=f"{NAME_OF[id(row)]}-{'strict' if strict else 'non-strict'}", marks=marks)
        for row in PLAIN
        for strict, marks in ((False, [] if row in FIRST else pytest.mark.thorough), (True, pytest.mark.thorough))
        if not strict or row in FIRST
    ],
)
SIZES = [(3, 5), (4, 7)]
DECLARED = declared()


def exported(module, row, inputs, strict):
    dims = dict(B=Dim("B", min=2, max=64), S=Dim("S", min=2, max=512))
    shapes = {name: {i: dims[d] for i, d in enumerate(shape) if d in dims} for name, shape in row.inputs.items()}
    return export(module, inputs, dynamic_shapes=(tuple(shapes.values()),), strict=strict)


def operators_in(program) -> list[str]:
    """Our operators in the graph, including in-place ones inside auto_functionalized nodes."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    names = [str(n.args[0] if str(n.target).startswith("auto_functionalized") else n.target) for n in nodes]
    return [name.removeprefix("liger.").removesuffix(".default") for name in names if name.startswith("liger.")]


def same(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs(ours), outputs(theirs), strict=True))


def test_every_operator_has_a_row():
    # tests/ops/quantize exports operators without gradients.
    assert sorted({row.op for row in ROWS} | ALIASES | WITHOUT_GRADIENTS) == operators()


@in_both_modes
def test_inference_graph(row, strict, device):
    module = RowModule(row).to(device).requires_grad_(False)
    program = exported(module, row, inputs_of(row, 2, 3, device), strict)
    # Decompositions do not depend on the mode.
    for graph in (program, program.run_decompositions()) if strict else (program,):
        # One that returns a view decomposes.
        decomposes = graph is not program and "Tensor(a)" in DECLARED[row.op].schema
        assert operators_in(graph) == [f"_{row.op}_fwd" if decomposes else row.op]
        for size in SIZES:
            inputs = inputs_of(row, *size, device)
            assert same(graph.module()(*inputs), module(*inputs))


def gradients(module, inputs):
    results = [r for r in outputs(module(*inputs)) if r.requires_grad]
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    return torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results])


@pytest.mark.thorough
@in_both_modes
def test_an_exported_program_trains(row, strict, device):
    module = RowModule(row).to(device)
    program = exported(module, row, inputs_of(row, 2, 3, device, requires_grad=True), strict)
    trained = program.module()
    for size in SIZES:
        inputs = inputs_of(row, *size, device, requires_grad=True)
        assert same(gradients(trained, inputs), gradients(module, inputs))


class ToLoss(torch.nn.Module):
    """Reduces all results to a scalar loss."""

    def __init__(self, row) -> None:
        super().__init__()
        self.call, self.scale = RowModule(row), torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, *inputs):
        first = next((i for i, t in enumerate(inputs) if t.is_floating_point()), None)
        results = outputs(self.call(*(t * self.scale if i == first else t for i, t in enumerate(inputs))))
        loss = sum(r.square().sum() for r in results if r.requires_grad)
        return loss * self.scale if first is None else loss


@pytest.mark.thorough
@in_tiers(PLAIN)
def test_training_graph(row, device):
    """A joint graph calls the private forward and backward operators and computes the gradients of eager."""
    module, inputs = ToLoss(row).to(device), inputs_of(row, 2, 3, device)
    program = _export_forward_backward(export(module, inputs))
    assert len(operators_in(program)) >= 2
    expected = module(*inputs)
    signature = program.graph_signature
    loss, *gradients = program.graph_module(
        *(program.state_dict[n] for n in (*signature.parameters, *signature.buffers)), *inputs
    )
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, [module.get_parameter(n) for n in signature.parameters])
    by_name = {n.name: g for n, g in zip(program.graph.output_node().args[0][1:], gradients)}
    for name, gradient in signature.backward_signature.gradients_to_parameters.items():
        torch.testing.assert_close(by_name[name], wanted[signature.parameters.index(gradient)])


LOAD = """
import torch, liger_ops
from tests.support.host.solo_group import solo_group
solo_group()
for number in range({count}):
    program = torch.export.load(f"{folder}/{{number}}.pt2")
    inputs, expected = torch.load(f"{folder}/{{number}}.pt")
    result = program.module()(*inputs)
    result = result if isinstance(result, (tuple, list)) else (result,)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), number
print("loaded", {count})
"""


@pytest.mark.thorough
def test_saved_programs_load_in_a_new_process(tmp_path, device):
    for number, row in enumerate(PLAIN):
        module = RowModule(row).to(device).requires_grad_(False)
        program = exported(module, row, inputs_of(row, 2, 3, device), strict=False)
        torch.export.save(program, tmp_path / f"{number}.pt2")
        inputs = inputs_of(row, 3, 5, device)
        torch.save((inputs, outputs(module(*inputs))), tmp_path / f"{number}.pt")
    assert forked_output_of(LOAD.format(count=len(PLAIN), folder=tmp_path)).split() == ["loaded", str(len(PLAIN))]


@pytest.mark.parametrize("strict", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_model(strict, device):
    model = example().TinyLlama().to(device).requires_grad_(False)
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=512)
    shapes = {"tokens": {0: batch, 1: length}}
    program = export(model, (torch.randint(128, (2, 6), device=device),), dynamic_shapes=shapes, strict=strict)
    layer = ["rms_norm", "rope", "fused_add_rms_norm", "swiglu_packed"]
    for graph in (program, program.run_decompositions()):
        assert operators_in(graph) == [*layer, *layer, "rms_norm"]
    for size in SIZES:
        tokens = torch.randint(128, size, device=device)
        torch.testing.assert_close(program.module()(tokens), model(tokens))
