"""Heads that cannot compute a loss without logits, and wrappers around models whose heads can."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.host.solo_group import group_of_one
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.patched_models import FUSED, assert_same_step


class AffineQuantizedTensor(nn.Parameter):
    """As a weight of torchao: a linear layer keeps its class."""


def quantise(head):
    head.weight = AffineQuantizedTensor(head.weight.detach(), requires_grad=False)
    return "its head's weight is AffineQuantizedTensor"


def hook(head):
    head.register_forward_hook(lambda module, inputs, logits: logits)
    return "its head has hooks"


def replace(head):
    forward = head.forward
    head.forward = lambda x: forward(x)
    return "its head's forward was replaced"


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("change", [quantise, hook, replace], ids=lambda f: f.__name__)
def test_the_report_says_that_logits_are_computed(change, order):
    model, ids = make("llama"), tokens()
    if order == "before":
        assert apply_liger_kernel(model).rows[-1].replacement == FUSED
    reason = change(model.lm_head)
    expected = step(model, ids)
    row = apply_liger_kernel(model).rows[-1]
    assert (row.replacement, row.reason) == ("cross_entropy", reason)
    names = nodes(model(input_ids=ids, labels=ids).loss)
    assert FUSED not in names and "cross_entropy" in names
    assert_same_step(model, ids, expected)
    unpatch(model)
    row = apply_liger_kernel(model, cross_entropy=False).rows[-1]
    assert (row.replacement, row.reason) == ("", reason)
    unpatch(model)
    assert apply_liger_kernel(model, fused_linear_cross_entropy=False).rows[-1].reason == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [True, False], ids=["use_orig_params", "flat"])
def test_fsdp1_is_looked_through(original):
    ids, expected = tokens(), step(make("llama"), tokens())[0]
    model = make("llama")
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    model = FullyShardedDataParallel(
        model, group_of_one(), auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
    )
    report = apply_liger_kernel(model)
    assert report.rows[-1].replacement == FUSED and {row.kind for row in report.left_alone} <= {"norm"}
    assert (report.coverage is not None) == original == (not report.left_alone)
    if not original:
        assert {row.reason.partition(":")[0] for row in report.left_alone} == {"FSDP has flattened its weight"}
        assert str(report).splitlines()[-1].startswith("loss ")
    loss = model(input_ids=ids, labels=ids).loss
    assert FUSED in nodes(loss)
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters()) and unpatch(model)


def test_weights_of_which_fsdp1_left_nothing():
    """As on a device without a part of them."""
    model = make("llama")
    for norm in (m for m in model.modules() if "Norm" in type(m).__name__):
        norm.weight = nn.Parameter(torch.empty(0))
    assert {row.replacement for row in apply_liger_kernel(model).rows if row.kind == "norm"} == {"rms_norm"}
