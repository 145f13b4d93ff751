"""Activations with trained numbers: what is recognised."""

import copy

import pytest
import torch
from torch import nn
from transformers.activations import XIELUActivation

from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.checks import assert_no_worse, assert_no_worse_overall, path_taken
from tests.support.models.language_models import tokens
from tests.support.models.patched_models import through_pickle
from tests.support.models.tiny_models import tiny


class Holder(nn.Module):
    def __init__(self, *activation):
        super().__init__()
        self.activation = XIELUActivation(*activation)

    def forward(self, x):
        return self.activation(x)


def row_of(report):
    (row,) = (row for row in report.rows if row.kind == "activation")
    return row.replacement, row.reason


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
                                    (torch.bfloat16, torch.float32), (torch.float32, torch.float32)])  # fmt: skip
def test_results_have_the_dtype_that_the_module_gives_them(dtypes):
    of_numbers, of_x = dtypes
    holder, x = Holder().to(of_numbers), 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).to(of_x)
    plain = holder(x)
    assert row_of(apply_liger_kernel(holder)) == ("xielu", "")
    with path_taken("cpu"):
        ours = holder(x)
    exact = copy.deepcopy(holder).double()
    unpatch(exact)
    assert_no_worse("y", ours, plain, exact(x.double()))
    assert unpatch(holder) and torch.equal(holder(x), plain)


@pytest.mark.parametrize("beta", [0.5, 0.25])
def test_numbers_of_the_module_are_used(beta):
    holder, x = Holder(0.8, 0.8, beta).float(), torch.linspace(-4, 4, 40).view(2, 20)
    plain = holder(x)
    assert row_of(apply_liger_kernel(holder)) == ("xielu", "")
    torch.testing.assert_close(holder(x), plain)
    torch.testing.assert_close(through_pickle(holder)(x), plain)


@pytest.mark.filterwarnings("ignore:.*is left as it is")
def test_what_is_left_alone(monkeypatch):
    assert row_of(apply_liger_kernel(Holder(), xielu=False)) == ("", "xielu is switched off")
    with torch.device("meta"):
        assert row_of(apply_liger_kernel(Holder())) == ("", "has no numbers beta and eps")
    monkeypatch.setattr(XIELUActivation, "forward", lambda self, x: x * self.alpha_p + self.alpha_n)
    assert row_of(apply_liger_kernel(Holder())) == ("", "computes something else")


def test_autocast():
    model, ids = tiny("apertus"), tokens()
    plain = model(ids).logits
    apply_liger_kernel(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        unpatch(model)
        theirs = model(ids).logits
    assert_no_worse_overall([ours], [theirs], [plain])
