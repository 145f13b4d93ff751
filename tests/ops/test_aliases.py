"""Operators under their former names, and programs that were saved with these."""

from pathlib import Path

import pytest
import torch
from checks import OPCHECKS, count_graphs, equal
from models import NAMES, ROWS, Call, inputs_of, outputs
from process_group import solo_group

from liger_ops import functional as F
from liger_ops.reference import operators

ALIASES = {name: operator.alias_of for name, operator in operators().items() if operator.alias_of}
SPLIT = {name: row for name, row in zip(NAMES, ROWS) if "group" in row.options}
DATA = Path(__file__).parent / "data"


class Alias(Call):
    def __init__(self, row):
        super().__init__(row)
        self.op = getattr(torch.ops.liger, f"vocab_parallel_{row.op}")


def twins(row):
    """The operator and its alias, with the same parameters, and inputs."""
    torch.manual_seed(0)
    whole, alias = Call(row), Alias(row)
    alias.load_state_dict(whole.state_dict())
    return whole, alias, inputs_of(row, 2, 5, requires_grad=True)


def results(function, module, inputs):
    found = outputs(function(*inputs))
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    loss = sum(t.double().square().sum() for t in found if t.requires_grad)
    return [*found, *torch.autograd.grad(loss, wanted)]


def test_every_alias_is_tested():
    assert {f"vocab_parallel_{row.op}" for row in SPLIT.values()} == set(ALIASES)


@pytest.mark.parametrize("name", SPLIT)
def test_equals_the_operator(name):
    whole, alias, inputs = twins(SPLIT[name])
    expected = results(whole, whole, inputs)
    assert equal(results(alias, alias, inputs), expected)
    backend, graphs = count_graphs()
    torch._dynamo.reset()
    assert equal(results(torch.compile(alias, backend=backend, fullgraph=True), alias, inputs), expected)
    assert len(graphs) == 1
    program = torch.export.export(alias, tuple(inputs)).module()
    assert equal(outputs(program(*inputs)), outputs(whole(*inputs)))


@pytest.mark.parametrize("name", SPLIT)
def test_opcheck(name):
    _, alias, inputs = twins(SPLIT[name])
    fixed = {name: getattr(alias, name) for name in alias.fixed}
    given = fixed | dict(zip(alias.names, inputs)) | dict(alias.parameters_of_op.items()) | alias.options
    torch.library.opcheck(alias.op.default, (), given, test_utils=OPCHECKS)


def test_arguments_in_the_former_order():
    group, x, head, target = solo_group(), torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, -100])
    found = F.vocab_parallel_fused_linear_cross_entropy(x, head, target, group, 5, None, None, "sum", sequence_dim=0)
    assert torch.equal(found, F.fused_linear_cross_entropy(x, head, target, reduction="sum"))
    with pytest.raises(RuntimeError, match="^fused_linear_cross_entropy: classes must be positive"):
        F.vocab_parallel_fused_linear_cross_entropy(x, head, target, group, 0)


def close(found, saved):
    for ours, theirs in zip(found, saved, strict=True):
        # The same formula by another build, perhaps on another CPU.
        torch.testing.assert_close(ours, theirs, rtol=64 * torch.finfo(torch.float32).eps, atol=1e-30)


def load_program():
    return torch.export.load(DATA / "losses.pt2").module()


def load_script():
    return torch.jit.load(DATA / "losses.pt")


@pytest.mark.parametrize("load", [load_program, load_script])
def test_saved_programs_run(load):
    """Saved when no operator had arguments for split classes, and their forms took them by position."""
    solo_group()
    saved = torch.load(DATA / "losses.results.pt")
    close(load()(*saved["arguments"]), saved["results"])
