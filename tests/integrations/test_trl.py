"""TRL's functions and trainers give the same results with liger_ops.integrations.trl as without.

With `-s`, the trainings print their time and the process's peak memory.
"""

import pytest
import torch

from benchmarks.trl_trainers import SIZES, TRAINERS, save_model, train
from liger_ops import functional as F
from tests.support.checks import assert_no_worse

pytestmark = pytest.mark.trl


@pytest.fixture
def ours():
    from liger_ops.integrations import trl

    yield trl
    trl.unpatch()


def leaves(*tensors, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def results(function, inputs, dtype=None):
    """Outputs, and the gradients of the inputs for random upstream gradients of the differentiable ones."""
    inputs = leaves(*inputs, dtype=dtype)
    outputs = [t for t in function(*inputs) if t is not None]
    differentiable = [t for t in outputs if t.requires_grad]
    torch.manual_seed(1)
    grads_out = [torch.randn(t.shape).to(t.dtype) for t in differentiable]
    wanted = [t for t in inputs if t is not None]
    grads = torch.autograd.grad(differentiable, wanted, grads_out, allow_unused=True)
    return [*outputs, *(g for g in grads if g is not None)]


def agree(ours, theirs, inputs, dtype, exact=None):
    """Our error against fp64 is at most 1.5 times theirs."""
    found, expected = results(ours, inputs, dtype), results(theirs, inputs, dtype)
    truth = results(exact or ours, inputs, torch.float64)
    assert len(found) == len(expected) == len(truth)
    for i, (a, b, oracle) in enumerate(zip(found, expected, truth)):
        if a.dtype == torch.bool:
            assert torch.equal(a, b)
        else:
            assert_no_worse(f"result {i}", a, b, oracle)


OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("outputs", [(), ("entropy",), OUTPUTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias, softcap, scale", [(False, None, 1.0), (True, 5.0, 0.5)])
def test_log_probs(ours, outputs, dtype, bias, softcap, scale):
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden, weight, of_classes = torch.randn(40, 16), torch.randn(67, 16) * 0.4, torch.randn(67) if bias else None
    targets = torch.randint(67, (40,))

    def call(function):
        return lambda h, w, b: function.apply(h, w, b, targets, 0.7, 32, softcap, scale, outputs)

    agree(call(ours.ChunkedLogProbFunction), call(ChunkedLogProbFunction), (hidden, weight, of_classes), dtype)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence(ours, beta, dtype):
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, bias = torch.randn(40, 16), torch.randn(67, 16) * 0.4, torch.randn(67)
    teacher = torch.randn(40, 24), torch.randn(67, 24) * 0.3, torch.randn(67)

    def call(function):
        def of_student(h, w, b):
            frozen = [t.to(h.dtype) for t in teacher]
            return function.apply(h, w, b, *frozen, beta, 0.7, 0.5, None, 2.0, 6.0)

        return of_student

    agree(call(ours.ChunkedDivergenceFunction), call(ChunkedDivergenceFunction), (hidden, weight, bias), dtype)


@pytest.mark.parametrize("items", [None, 50, torch.tensor(50.0)])
@pytest.mark.parametrize("masked", ["some", "all"])
def test_divergence_loss(ours, items, masked):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    hidden, weight, bias = torch.randn(2, 20, 16), torch.randn(67, 16) * 0.4, torch.randn(67)
    teacher, head = torch.randn(2, 20, 24), torch.randn(67, 24) * 0.3
    mask = (torch.rand(2, 20) < 0.7).long() if masked == "some" else torch.zeros(2, 20, dtype=torch.long)

    def call(function):
        def of_student(h, w, b):
            frozen = [t.to(h.dtype) for t in (teacher, head)]
            return function(h, frozen[0], w, frozen[1], mask, 0.4, items, b, temperature=0.8)[:2]

        return of_student

    agree(call(ours.chunked_divergence_loss), call(_chunked_divergence_loss), (hidden, weight, bias), torch.float32)


def test_partitioned_parameters_take_trls_own_functions(ours, monkeypatch):
    """DeepSpeed ZeRO-3 marks its parameters by ds_id."""
    monkeypatch.setattr(F, "fused_linear_log_probs", None)
    ours.patch()
    weight = torch.nn.Parameter(torch.randn(11, 8))
    weight.ds_id = 0
    from trl.trainer.utils import _ChunkedLogProbFunction

    found = _ChunkedLogProbFunction.apply(torch.randn(5, 8), weight, None, torch.arange(5), 1.0, 4)
    assert found[0].shape == (5,)


# ---- Patching


def test_patch_reports_every_name_and_unpatch_restores_them(ours):
    import trl.kernels
    import trl.trainer.distillation_trainer as distillation
    import trl.trainer.utils as utils

    held = {utils: "_ChunkedLogProbFunction", trl.kernels: "ChunkedLogProbFunction",
            distillation: "_chunked_divergence_loss"}  # fmt: skip
    theirs = [getattr(module, name) for module, name in held.items()]
    report, again = ours.patch(), ours.patch()
    for module, name in held.items():
        assert getattr(module, name).__module__ == ours.__name__
        assert f"{module.__name__}.{name}" in report.replaced
    assert "trl.trainer.distillation_trainer.ChunkedDivergenceFunction" in report.replaced
    assert again.replaced == report.replaced and "now liger_ops.integrations.trl" in str(report)
    assert "selective_log_softmax" in " ".join(report.left)
    ours.unpatch()
    assert [getattr(module, name) for module, name in held.items()] == theirs


def test_a_missing_name_is_reported(ours, monkeypatch):
    import trl.trainer.distillation_trainer as distillation

    monkeypatch.delattr(distillation, "_chunked_divergence_loss")
    report = ours.patch()
    assert "has no such name" in report.left["trl.trainer.distillation_trainer._chunked_divergence_loss"]
    ours.unpatch()


# ---- Trainers


STEPS, SIZE = 20, SIZES["tiny"]


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers(ours, kind, tmp_path, monkeypatch):
    calls = []
    for name in ("fused_linear_log_probs", "fused_linear_divergence"):
        op = getattr(F, name)
        monkeypatch.setattr(F, name, lambda *a, op=op, **k: calls.append(k) or op(*a, **k))
    save_model(SIZE, tmp_path / "start")

    def trained():
        trainer, found = train(kind, SIZE, STEPS, tmp_path / "start", tmp_path)
        print(f"{kind}: {sum(found['seconds']):.2f} s, peak of the process {found['peak_mib']:.0f} MiB")
        assert len(found["loss"]) == STEPS
        curves = {name: torch.tensor(found[name]) for name in ("loss", "grad_norm")}
        return curves | {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}

    theirs = trained()
    assert not calls
    ours.patch()
    found = trained()
    assert len(calls) >= STEPS
    for name, expected in theirs.items():
        # Sums in another order, whose differences grow with the steps. Adam's steps do not shrink with the gradient.
        tolerance = 1e-5 if name in ("loss", "grad_norm") else SIZE.rate / 10
        torch.testing.assert_close(
            found[name], expected, rtol=1e-5 * STEPS, atol=tolerance, msg=lambda m: f"{name}: {m}"
        )
