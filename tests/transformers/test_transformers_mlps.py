"""Which MLPs are understood: sizes that coincide, and why others are left alone."""

import importlib
import itertools

import pytest
import torch
from language_models import make, step, tokens
from patched_models import assert_same_step
from torch import nn
from transformers import GraniteMoeSharedConfig, LlamaConfig, Phi3Config

from liger_ops.transformers import apply_liger_kernel, probe

CONFIGS = {"llama": LlamaConfig, "phi3": Phi3Config, "granitemoeshared": GraniteMoeSharedConfig}
CLASSES = {"llama": "LlamaMLP", "phi3": "Phi3MLP", "granitemoeshared": "GraniteMoeSharedMLP"}


class SlicedMLP(nn.Module):
    """Reads its sizes in forward, under names that do not tell them apart."""

    def __init__(self, n, m):
        super().__init__()
        self.m, self.n = m, n
        self.both, self.back = nn.Linear(n, 2 * m), nn.Linear(m, n)

    def forward(self, x):
        y = self.both(x.view(-1, self.n))
        return self.back(nn.functional.silu(y[:, : self.m]) * y[:, self.m :]).view(x.shape)


@pytest.mark.parametrize("inner", [32, 16, 64, 24])
@pytest.mark.parametrize("name", [*CLASSES, "sliced"])
def test_sizes_that_coincide(name, inner):
    """32: inner is hidden. 16: gate and up together are. 64: inner is twice hidden."""
    if name == "sliced":
        mlp = SlicedMLP(32, inner)
    else:
        source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        sizes = dict(hidden_size=32, intermediate_size=inner, shared_intermediate_size=inner)
        mlp = getattr(source, CLASSES[name])(CONFIGS[name](**sizes, pad_token_id=0))
    model, x = nn.Sequential(mlp), torch.randn(3, 32)
    expected = model(x)
    assert apply_liger_kernel(model).rows[0].replacement == "swiglu"
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_models_whose_sizes_coincide(name):
    model, ids = make(name, intermediate_size=32), tokens()
    plain = step(model, ids)
    assert "mlp" not in {row.kind for row in apply_liger_kernel(model).left_alone}
    assert_same_step(model, ids, plain)


@pytest.mark.parametrize("order", [*itertools.permutations(("first", "second", "third"))])
def test_roles_do_not_depend_on_the_order_of_children(order):
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(8, 8))

        def forward(self, x):
            return self.second(nn.functional.silu(self.third(x)) * self.first(x))

    assert probe.identify_mlp(MLP()).projections == ("third", "first", "second")


class FailingMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        raise ValueError("takes pairs of rows only\nand more")


class FailingNorm(nn.RMSNorm):
    def forward(self, x):
        raise ValueError("takes pairs of rows only\nand more")


@pytest.mark.parametrize("module", [FailingMLP(), FailingNorm(8, eps=1e-6)], ids=lambda m: type(m).__name__)
def test_reasons_tell_what_was_raised(module):
    with pytest.warns(RuntimeWarning, match="left as it is"):
        (row,) = apply_liger_kernel(nn.Sequential(module)).rows[:1]
    assert row.reason.endswith("(ValueError: takes pairs of rows only)")
