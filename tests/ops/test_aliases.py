"""Operators under their former names, and programs that were saved with these."""

from pathlib import Path

import pytest
import torch

from liger_ops import functional as F
from tests.support.calls import NAMES, ROWS, RowModule, inputs_of, outputs
from tests.support.checks import OPCHECKS, count_graphs, equal
from tests.support.host.solo_group import SOLO, solo_group
from tests.support.operator_calls import ALIASES

SPLIT = {name: row for name, row in zip(NAMES, ROWS) if "group" in row.options}
DATA = Path(__file__).parent / "data"


class Alias(RowModule):
    def __init__(self, row):
        super().__init__(row)
        self.op = getattr(torch.ops.liger, f"vocab_parallel_{row.op}")


def twins(row):
    """The operator and its alias, with the same parameters, and inputs."""
    torch.manual_seed(0)
    whole, alias = RowModule(row), Alias(row)
    alias.load_state_dict(whole.state_dict())
    return whole, alias, inputs_of(row, 2, 5, requires_grad=True)


def results(function, module, inputs):
    found = outputs(function(*inputs))
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    loss = sum(t.double().square().sum() for t in found if t.requires_grad)
    return [*found, *torch.autograd.grad(loss, wanted)]


def test_every_alias_is_tested():
    assert {f"vocab_parallel_{row.op}" for row in SPLIT.values()} == ALIASES


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


def losses_of(hidden, head, logits, target):
    """What the saved programs compute."""
    linear = (hidden, head, target)
    models = (hidden, head, hidden, 2 * head)
    smooth = dict(label_smoothing=0.1, lse_square_scale=1e-4, softcap=30.0, logits_scale=0.5)
    split = dict(group=SOLO, classes=11)
    return (
        F.fused_linear_cross_entropy(*linear, **smooth),
        F.fused_linear_cross_entropy_with_metrics(*linear).z_loss,
        F.fused_linear_cross_entropy_with_log_probs(*linear).entropy,
        F.cross_entropy(logits, target, reduction="sum"),
        F.cross_entropy_with_metrics(logits, target).token_accuracy,
        F.fused_linear_log_probs(*linear, temperature=2.0).log_probs,
        F.fused_linear_divergence(*models, beta=0.5).divergence,
        F.fused_linear_cross_entropy(*linear, reduction="sum", class_sizes=[11], **split),
        F.fused_linear_cross_entropy_with_metrics(*linear, **split).z_loss,
        F.fused_linear_cross_entropy_with_log_probs(*linear, **split).entropy,
        F.cross_entropy(logits, target, reduction="sum", **split),
        F.cross_entropy_with_metrics(logits, target, **split).token_accuracy,
        F.fused_linear_log_probs(*linear, temperature=2.0, **split).log_probs,
        F.fused_linear_divergence(*models, beta=0.5, **split).divergence,
    )


def load_program():
    return torch.export.load(DATA / "losses.pt2").module()


def load_script():
    return torch.jit.load(DATA / "losses.pt")


@pytest.mark.parametrize("load", [load_program, load_script])
def test_saved_programs_run(load):
    """They call the operators as before these had arguments for split classes, and their forms by position."""
    solo_group()
    arguments = torch.randn(5, 8), torch.randn(11, 8), torch.randn(5, 11), torch.tensor([0, 3, -100, 10, 2])
    assert equal(load()(*arguments), losses_of(*arguments))
