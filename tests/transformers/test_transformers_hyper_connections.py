"""Hyper-connections of transformers' models, and of modules that compute something close."""

import importlib.util

import pytest
import torch
from checks import path_taken
from deepseek_models import model_of
from language_models import known, step, tokens
from patched_models import assert_as_exact, assert_same_step, trained
from torch import nn

from liger_ops.transformers import apply_liger_kernel, hyper_connections, unpatch

CONNECTIONS = {
    "deepseek_v4": {"DeepseekV4HyperConnection": 5, "DeepseekV4HyperHead": 1},
    "hy_v4": {"HYV4HyperConnection": 4, "HYV4HyperHead": 1},
}


@pytest.mark.parametrize("name", known(CONNECTIONS))
def test_training_and_generation(name):
    """Four streams, which have kernels."""
    model, ids = model_of(name, hc_mult=4), tokens()
    losses, plain = trained(model), step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False)
    report = apply_liger_kernel(model.train())
    found = {row.type: row.replacement for row in report.rows if row.kind == "connection"}
    assert found == dict.fromkeys(CONNECTIONS[name], "hyper_pre"), str(report)
    assert_same_step(model, ids, plain)
    assert_as_exact(lambda: trained(model), losses, model)
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    assert unpatch(model) and torch.equal(step(model.train(), ids)[0], plain[0])


CLASSES = [
    ("deepseek_v4", "DeepseekV4HyperConnection", "DeepseekV4Config", (1, 2, 0)),
    ("deepseek_v4", "DeepseekV4HyperHead", "DeepseekV4Config", ()),
    ("hy_v4", "HYV4HyperConnection", "HYV4Config", (1, 0)),
    ("hy_v4", "HYV4HyperHead", "HYV4Config", ()),
    ("glm5_next", "Glm5NextTextHyperConnection", "Glm5NextTextConfig", (1, 2, 0)),
]
CLASSES = [row for row in CLASSES if importlib.util.find_spec(f"transformers.models.{row[0]}")]


def connection_of(model_type, cls, config):
    source = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    configuration = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    torch.manual_seed(0)
    made = getattr(source, cls)(getattr(configuration, config)(hidden_size=24, hc_mult=4))
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type, cls, config, order", CLASSES)
def test_classes(model_type, cls, config, order, dtype):
    model = nn.Sequential(connection_of(model_type, cls, config)).requires_grad_(False)
    streams = torch.randn(2, 5, 4, 24, dtype=dtype)

    def results(x):
        out = model(x)
        return out if isinstance(out, tuple) else (out,)

    exact, theirs = results(streams.float()), results(streams)
    report = apply_liger_kernel(model)
    assert [row.replacement for row in report.rows if row.kind == "connection"] == ["hyper_pre"], str(report)
    with path_taken("cpu"):
        ours = results(streams)
    assert hyper_connections.identify(model[0], dict(hyper_pre=True)).order == order
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # A result in bf16 is rounded once by both.
        eps = torch.finfo(a.dtype).eps
        assert float((a.float() - truth).abs().max()) <= 4 * eps * float(truth.abs().max())


def test_what_computes_something_else_is_left_alone():
    model = nn.Sequential(connection_of(*CLASSES[0][:3]))
    cls = type(model[0])
    other = type(cls.__name__, (cls,), {"forward": lambda self, x: tuple(2 * t for t in cls.forward(self, x))})
    model[0].__class__ = other
    report = apply_liger_kernel(model)
    assert report.rows[0].reason == "computes something else"


def test_autocast_runs_the_original():
    model, streams = nn.Sequential(connection_of(*CLASSES[0][:3])), torch.randn(2, 5, 4, 24)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(streams)
        apply_liger_kernel(model)
        ours = model(streams)
    assert all(map(torch.equal, ours, theirs))
