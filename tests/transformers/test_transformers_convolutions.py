"""Models whose short convolutions run in causal_conv1d."""

import importlib

import pytest
import torch
from torch import nn

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, convolutions
from tests.support.checks import assert_no_worse, path_taken
from tests.support.models.language_models import tokens
from tests.support.models.patched_models import assert_as_exact
from tests.support.models.tiny_models import tiny


def convolutions_in(report):
    return [row for row in report.rows if row.kind == "conv"]


def test_generation_continues_from_a_cache():
    """Several tokens after cached ones, which the model joins with the cached rows before the convolution."""
    model, ids = tiny("qwen3_next").eval(), tokens()

    @torch.no_grad()
    def continued():
        first = model(ids[:, :7], use_cache=True)
        return [[model(ids[:, 7:], cache=first.cache).logits]]

    expected = continued()
    apply_liger_kernel(model)
    assert_as_exact(continued, expected, model)


# ---- The function

SOURCE = "transformers.models.qwen3_next.modeling_qwen3_next"


@pytest.fixture
def functions(monkeypatch):
    """transformers' function, ours, and a list of the operator's calls."""
    original = importlib.import_module(SOURCE).causal_conv1d_fn
    seen, operator = [], F.causal_conv1d
    monkeypatch.setattr(F, "causal_conv1d", lambda *a, **k: (seen.append(a), operator(*a, **k))[1])
    return original, convolutions.convolution_function(original), seen


def made(dtype=torch.float32, weights=torch.float32, columns=6, width=4):
    def random(*shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    x = random(2, 9, 2 * columns, seed=0).to(dtype)[..., columns:].transpose(1, 2)
    return x, random(columns, width, seed=1).to(weights), random(columns, seed=2).to(weights)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_and_memory(functions, dtype, weights, activation):
    """In every mix of dtypes, results have the original's dtype and are as exact. Input and result are transposed views."""
    original, ours, seen = functions
    x, weight, bias = made(dtype, weights)
    with path_taken("cpu"):
        y = ours(x, weight, bias=bias, activation=activation)
    expected = original(x, weight, bias, activation)
    assert y.dtype == expected.dtype and y.transpose(1, 2).is_contiguous() and len(seen) == 1
    if dtype == weights or weights == torch.float32 != dtype != torch.float64:
        assert seen[0][0].data_ptr() == x.data_ptr()
    assert_no_worse("y", y, expected, original(x.double(), weight.double(), bias.double(), activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(functions, dtype):
    original, ours, seen = functions
    x, weight, bias = made(dtype)
    with torch.autocast("cpu", torch.bfloat16), path_taken("cpu"):
        y = ours(x, weight, bias, "silu")
    with torch.autocast("cpu", torch.bfloat16):
        expected = original(x, weight, bias, "silu")
    assert_no_worse("y", y, expected, original(x.double(), weight.double(), bias.double(), "silu"))
    assert len(seen) == 1


def outcome(function, *given, **named):
    """The result, or what the error says."""
    try:
        return function(*given, **named)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)


def test_calls_that_the_operator_does_not_take_run_the_original(functions):
    original, ours, seen = functions
    x, weight, bias = made()
    wide = made(width=9)[1]
    for given, named in (
        ((x, weight, bias, "gelu"), {}),
        ((x, weight, bias), dict(initial_states=x[..., :3])),
        ((x, weight, bias), dict(return_final_states=True)),
        ((x, wide, None, "silu"), {}),
        ((x, weight, bias.double(), "silu"), {}),
        ((x[:1], weight), dict(cu_seqlens=torch.tensor([0, 9]))),
        ((x[0], weight), {}),
        ((x, weight, bias), dict(bias=bias)),
        ((x, weight, bias, "silu", 1), {}),
    ):
        found = [outcome(function, *given, **named) for function in (ours, original)]
        assert torch.equal(*found) if isinstance(found[0], torch.Tensor) else found[0] == found[1]
    assert not seen


def test_arguments_that_the_original_ignores(functions):
    _, ours, seen = functions
    x, weight, bias = made()
    assert torch.equal(ours(x, weight, bias, num_items_in_batch=3, max_length_q=9), ours(x, weight, bias))
    assert len(seen) == 2


# ---- What is left alone


def causal_conv1d_fn(x, weight, bias=None, activation=None):
    y = nn.functional.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return (y if activation is None else nn.functional.silu(y))[..., : x.shape[-1]]


def clamped_conv1d_fn(x, weight, bias=None, activation=None):
    return causal_conv1d_fn(x, weight, bias, activation).clamp(-50, 50)


def wide_conv1d_fn(x, weight, bias=None, activation=None):
    return causal_conv1d_fn(x.to(weight.dtype), weight, bias, activation)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(6, 6, 4, groups=6)

    def forward(self, x):
        return causal_conv1d_fn(x.mT, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu").mT


class Clamped(Mixer):
    def forward(self, x):
        return clamped_conv1d_fn(x.mT, self.conv1d.weight.squeeze(1), self.conv1d.bias).mT


class Wide(Mixer):
    def forward(self, x):
        return wide_conv1d_fn(x.mT, self.conv1d.weight.squeeze(1), self.conv1d.bias).mT


def test_what_is_left_alone():
    replaced = Mixer()
    replaced.forward = lambda x: x
    cases = {
        "": Mixer(),
        "clamped_conv1d_fn computes something else": Clamped(),
        "the result of wide_conv1d_fn in half precision is wider": Wide(),
        "its forward was replaced": replaced,
    }
    for reason, mixer in cases.items():
        model = nn.ModuleDict(dict(mixer=mixer, norm=nn.RMSNorm(6, 1e-6)))
        (row,) = convolutions_in(apply_liger_kernel(model))
        assert (row.reason, bool(row.replacement)) == (reason, not reason)


def test_a_function_of_ones_own():
    """It takes no keywords that it does not name."""
    mixer, x = Mixer(), torch.randn(2, 9, 6)
    expected = mixer(x)
    apply_liger_kernel(mixer)
    assert type(mixer).liger_row == ("conv", "causal_conv1d")
    with path_taken("cpu"):
        assert_as_exact(lambda: [[mixer(x)]], [[expected]], mixer)
    ours = convolutions.convolution_function(causal_conv1d_fn)
    with pytest.raises(TypeError, match="max_length_q"):
        ours(x.mT, mixer.conv1d.weight.squeeze(1), max_length_q=9)
