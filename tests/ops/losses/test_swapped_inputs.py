"""Losses of a linear layer say so if hidden states and head weight were swapped."""

import pytest
import torch

from liger_ops import functional, nn

CLASSES, WIDTH = 10, 8
HEAD = torch.randn(CLASSES, WIDTH)
SHAPES = [(6,), (2, 3)]
LOSSES = [
    "fused_linear_cross_entropy", "fused_linear_cross_entropy_with_metrics", "fused_linear_cross_entropy_with_log_probs",
    "fused_linear_log_probs",
]  # fmt: skip


def ids(*shape):
    return torch.randint(CLASSES, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_targets(name, shape):
    x = torch.randn(*shape, WIDTH)
    message = rf"^{name}: (target|weight) must have shape .*; input and weight may be swapped\)"
    targets = [ids(*shape)] + ([ids(*shape, 3)] if name == "fused_linear_log_probs" else [])
    loss = getattr(functional, name)
    for op in (loss, loss.reference):
        for target in targets:
            op(x, HEAD, target)
            with pytest.raises(RuntimeError, match=message):
                op(HEAD, x, target)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", ["s", "t"])
def test_divergence(side, shape):
    x, teacher = torch.randn(*shape, WIDTH), torch.randn(*shape, WIDTH)
    arguments = {"s": (HEAD, x, teacher, HEAD), "t": (x, HEAD, HEAD, teacher)}[side]
    message = rf"^fused_linear_divergence: .* must have shape .*; {side}_input and {side}_weight may be swapped"
    for op in (functional.fused_linear_divergence, functional.fused_linear_divergence.reference):
        op(x, HEAD, teacher, HEAD)
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


def test_the_module():
    x, target = torch.randn(6, WIDTH), ids(6)
    with pytest.raises(RuntimeError, match="input and weight may be swapped"):
        nn.FusedLinearCrossEntropyLoss()(HEAD, x, target)


def test_no_hint_about_other_mistakes():
    x, target = torch.randn(6, WIDTH), ids(6)
    for wrong in ((x, HEAD, target[1:]), (x, HEAD[:, 1:], target), (x, HEAD, target[:, None])):
        with pytest.raises(RuntimeError) as raised:
            functional.fused_linear_cross_entropy(*wrong)
        assert "swapped" not in str(raised.value)
