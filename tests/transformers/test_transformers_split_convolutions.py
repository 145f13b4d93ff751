"""Convolutions that run with the statements around them: causal_conv1d_split in delta nets, short_conv between two gates."""

import copy

import pytest
import torch

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, convolutions, split_convolutions
from tests.support.models.language_models import known, step, tokens
from tests.support.models.patched_models import assert_same_step, calls_of
from tests.support.models.tiny_models import tiny

SPLIT, SHORT = "causal_conv1d_split", "short_conv"


def made(name, **options):
    """Without a cache, beside which the statements stay."""
    config = copy.deepcopy((model := tiny(name)).config)
    for option, value in {"use_cache": False, **options}.items():
        setattr(config, option, value)
    torch.manual_seed(0)
    return type(model)(config).train()


def mixer_of(model):
    (mixer,) = (m for m in model.modules() if convolutions.looks_convolving(m))
    return mixer


def recorded(monkeypatch, operator):
    """Calls of the operator."""
    seen, function = [], getattr(F, operator)
    monkeypatch.setattr(F, operator, lambda *a, **k: (seen.append((a[0], k)), function(*a, **k))[1])
    return seen


# Heads of keys and of values: with one value head for each key head, z stays a view.
SIZES = [
    *(("qwen3_next", SPLIT, {"linear_num_key_heads": k, "linear_num_value_heads": v}) for k, v in ((2, 2), (1, 4))),
    *(("lfm2", SHORT, {"conv_L_cache": width, "conv_bias": bias}) for width in (3, 7) for bias in (True, False)),
]


@pytest.mark.parametrize("name, operator, options", SIZES, ids=str)
def test_sizes(name, operator, options):
    model, ids = made(name, **options), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert calls_of(operator, model, ids) == 1
    assert_same_step(model, ids, plain)


def test_half_precision_and_autocast():
    """Rounded where the model rounds: results differ in the last digit at most where sums have another order."""
    for dtype, cast in ((torch.bfloat16, False), (torch.float32, True)):
        model = made("lfm2").to(dtype)
        mixer, rows = mixer_of(model), torch.randn(2, 12, model.config.hidden_size, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            plain = mixer(rows)
            apply_liger_kernel(model)
            found = mixer(rows)
            assert calls_of(SHORT, model, tokens())
        assert found.dtype == plain.dtype == torch.bfloat16
        torch.testing.assert_close(found, plain, atol=2**-7 * plain.detach().abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", known(["qwen3_next", "kimi_linear"]))
def test_no_columns_are_copied_before_the_convolution(name, monkeypatch):
    """In Qwen3-Next the operator gets the projection, elsewhere what the model joined."""
    model, seen = made(name), recorded(monkeypatch, SPLIT)
    apply_liger_kernel(model)
    model(tokens())
    ((x, options),) = seen
    assert options["groups"] == (2 if name == "qwen3_next" else 1)
    assert len(options["sizes"]) == (4 if name == "qwen3_next" else 3)
    assert x.grad_fn.name() == ("CatBackward0" if name == "kimi_linear" else "UnsafeViewBackward0") or x.is_contiguous()


def test_short_conv_gets_the_projection(monkeypatch):
    model, seen = made("lfm2"), recorded(monkeypatch, SHORT)
    apply_liger_kernel(model)
    model(tokens())
    ((rows, _),) = seen
    assert rows.is_contiguous() and rows.shape == (*tokens().shape, 3 * model.config.hidden_size)


@pytest.mark.parametrize("name, operator, child", [("qwen3_5_text", SPLIT, "conv1d"), ("lfm2", SHORT, "conv")])
def test_what_the_operator_does_not_take_runs_the_original_statements(name, operator, child):
    model, ids = made(name), tokens()
    mixer = mixer_of(model)
    # The model's function computes in the weight's dtype, which the operator for one convolution gets.
    getattr(mixer, child).double()
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert not calls_of(operator, model, ids) and calls_of("causal_conv1d", model, ids) == 1
    assert_same_step(model, ids, plain)
    getattr(mixer, child).float()
    assert calls_of(operator, model, ids) == 1
    if operator == SPLIT:
        mixer.key_dim += 8
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            model(ids)


def test_a_projection_in_another_order_is_left_to_the_model():
    """The columns are concatenated as before then, and the operator splits them."""
    model, ids = made("qwen3_next"), tokens()
    mixer = mixer_of(model)

    class Turned(type(mixer)):
        def fix_query_key_value_ordering(self, mixed_qkvz, mixed_ba):
            return super().fix_query_key_value_ordering(mixed_qkvz.flip(-1), mixed_ba)

    mixer.__class__ = Turned
    assert split_convolutions.layouts_of(mixer, Turned.forward) == ()
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert calls_of(SPLIT, model, ids) == 1
    assert_same_step(model, ids, plain)
