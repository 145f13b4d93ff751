"""cross_entropy and cross_entropy_: which memory they overwrite, and which errors autograd raises."""

import pytest
import torch
import torch.nn.functional as nnf

from liger_ops.functional import cross_entropy, cross_entropy_, cross_entropy_with_metrics
from tests.support.checks import check_second_backward
from tests.support.families.logits_losses import of_cross_entropy


def make(shape, device, **options):
    """(logits, target, weight or None)"""
    return [*of_cross_entropy(shape, torch.float32, device, **options)[0].values()]


class Keep:
    """Ways to keep a reference to the logits. Each returns the object that must not change."""

    def nothing(logits):
        return None

    def a_reference(logits):
        return logits

    def a_view(logits):
        return logits[1:]

    def a_detached_view(logits):
        return logits.detach()

    def the_storage(logits):
        return logits.untyped_storage()

    def another_graph(logits):
        return logits.square().sum()


WAYS = [k for k in vars(Keep) if not k.startswith("_")]


@pytest.mark.parametrize("op", [cross_entropy, cross_entropy_with_metrics])
@pytest.mark.parametrize("way", WAYS)
def test_only_unreferenced_logits_are_overwritten(way, op, device):
    leaf, target, _ = make((4, 64), device)
    logits = leaf * 1
    address, kept = logits.data_ptr(), getattr(Keep, way)(logits)
    out = op(logits, target)
    loss = out[0] if isinstance(out, tuple) else out
    del logits, out
    # The multiplication's backward makes a new buffer, so a hook records the gradient that it receives.
    seen = []
    loss.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    loss.backward(retain_graph=kept is not None and way == "another_graph")
    assert (seen == [address]) == (kept is None)
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0, device=device).set_(kept).view(4, 64)
    if way == "another_graph":
        expected = 2 * leaf.detach()
        assert torch.equal(torch.autograd.grad(kept, leaf)[0], expected)
    elif kept is not None:
        assert torch.equal(kept.detach(), leaf.detach()[-len(kept) :])


def test_a_retained_graph_does_not_overwrite_the_logits(device):
    inputs = make((4, 64), device)
    check_second_backward(lambda x, *rest: cross_entropy(x * 1, *rest), inputs, [torch.ones((), device=device)])


@pytest.mark.parametrize("held", [True, False])
def test_saved_tensor_hooks(held, device):
    leaf, target, _ = make((4, 64), device, ignored=0)
    packed = []

    def pack(t):
        packed.append(t)
        return len(packed) - 1 if held else t

    unpack = (lambda i: packed[i]) if held else (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = cross_entropy(leaf * 1, target)
    values = [t.clone() for t in packed]
    grad = torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(nnf.cross_entropy(leaf, target), leaf)[0])
    assert all(torch.equal(a, b) for a, b in zip(packed, values))


def test_checkpoint(device):
    leaf, target, _ = make((4, 64), device)
    head = torch.nn.Linear(64, 40, device=device)
    losses = lambda x: cross_entropy(head(x), target % 40)  # noqa: E731
    plain = torch.autograd.grad(losses(leaf), leaf)[0]
    again = torch.utils.checkpoint.checkpoint(losses, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, leaf)[0], plain)


# ---- cross_entropy_


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_gradient_overwrites_the_logits(reduction, device):
    leaf, target, weight = make((5, 48), device, weight="fp32")
    expected_loss = cross_entropy(leaf, target, weight, reduction)
    (expected,) = torch.autograd.grad(expected_loss.sum(), leaf)
    logits = leaf * 1
    loss = cross_entropy_(logits, target, weight, reduction)
    assert logits._version == 1
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(logits.detach(), expected)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(grad, expected)


def test_inference_mode_bumps_the_version_of_the_logits(device):
    leaf, target, _ = make((5, 48), device)
    logits = leaf * 1
    square = (logits * logits).sum()
    with torch.inference_mode():
        cross_entropy_(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(square, leaf)


def test_overwritten_logits_have_no_gradient(device):
    leaf, target, _ = make((5, 48), device)
    logits = leaf * 1
    loss = cross_entropy_(logits, target)
    with pytest.raises(RuntimeError, match="cross_entropy_: the logits hold their gradient now"):
        (loss + logits.sum()).backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        cross_entropy_(leaf, target)


def test_a_modified_gradient_is_detected(device):
    leaf, target, _ = make((5, 48), device)
    logits = leaf * 1
    loss = cross_entropy_(logits, target)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_overwriting_a_tensor_saved_by_its_producer_is_detected(device):
    leaf, target, _ = make((5, 48), device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy_(leaf.exp(), target).backward()


def test_overwriting_a_view(device):
    leaf, target, _ = make((4, 48), device, ignored=0)
    logits = (leaf * 1).view(2, 2, 48)
    loss = cross_entropy_(logits.view(-1, 48), target)
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(nnf.cross_entropy(leaf, target), leaf)[0])
    assert torch.equal(logits.detach().view(-1, 48), grad)


def test_overwriting_without_grad(device):
    leaf, target, _ = make((4, 48), device)
    with torch.no_grad():
        logits = leaf.clone()
        cross_entropy_(logits, target)
    torch.testing.assert_close(logits, torch.autograd.grad(nnf.cross_entropy(leaf, target), leaf)[0])
