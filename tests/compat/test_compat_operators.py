"""liger_ops.compat: every name that operators serve, against its formula in fp64, with gradients, in three dtypes."""

import importlib

import pytest
import torch

from liger_ops._accuracy import gradients
from tests.support.checks import ROOT, assert_no_worse, like, roundings
from tests.support.oracles import from_liger_kernel
from tests.support.oracles.liger_kernel_calls import activations, norms, rotations
from tests.support.oracles.liger_kernel_losses import V, cross_entropies, divergences, preferences

pytestmark = pytest.mark.usefixtures("liger_kernel_served")
FAMILIES = (norms, activations, rotations, cross_entropies, divergences, preferences)
CALLS = [
    (family, name, path) for family in FAMILIES for name, case in family(8).items() for path in case.calls
]  # fmt: skip


def theirs(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)


@pytest.mark.parametrize("n, dtype", [(33, torch.float32), (33, torch.bfloat16), (8, torch.float16)], ids=str)
@pytest.mark.parametrize("family, name, path", CALLS, ids=[f"{path} - {name}" for _, name, path in CALLS])
def test_results_and_gradients(family, name, path, n, dtype):
    case = family(n)[name]
    call = case.calls[path](theirs(path))
    inputs = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in case.inputs(n)]
    outs = case.formula(*(t.detach() for t in inputs))
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads_out = [torch.randn(o.shape) for o in outs]
    found = gradients(call, [like(t) for t in inputs], grads_out)
    eager, exact = (gradients(case.formula, [like(t, d) for t in inputs], grads_out) for d in (dtype, torch.float64))
    rounds = case.rounds or any(t.shape == (V, n) for t in inputs)  # of a head, logits and their gradients
    bounds = roundings(case.formula, inputs, grads_out, exact, precision=dtype if rounds else None)
    largest = max(float(t.detach().abs().max()) for t in (*inputs, torch.ones(())))
    scale = largest * max(float(g.abs().max()) for g in grads_out)
    assert all(t.dtype in (dtype, torch.float32) for t in found[: len(outs)])
    assert {t.dtype for t in found[len(outs) :]} == {dtype}
    for i, (ours, plain, truth) in enumerate(zip(found, eager, exact, strict=True)):
        assert_no_worse(
            f"result {i}", ours, plain.to(ours.dtype), truth, scale if i >= len(outs) else 0.0, bounds=(bounds, i)
        )


# Tests of names that take other arguments than a call here can pass.
ELSEWHERE = {
    "LigerExperts": "test_compat_models.py::test_experts",
    "LigerFusedLinearPPOBase": "test_compat_bases.py::test_policy",
    "LigerFusedLinearPreferenceBase": "test_compat_bases.py::test_preference",
    "LigerFusedLinearUnpairedPreferenceBase": "test_compat_bases.py::test_unpaired_preference",
    "apply_liger_llama4_rope_full": "test_compat_models.py::test_rotations_of_a_module",
    "fused_selective_log_softmax": "test_compat_chunked_loss.py::test_triton_grpo_loss",
}


def test_no_name_is_left_out():
    """A name in several modules may be one value."""
    tested = {id(theirs(path)) for _, _, path in CALLS}
    listed = [from_liger_kernel.found(path) for path in from_liger_kernel.listed()]
    served = [entry for entry in listed if from_liger_kernel.kind(entry) == "Served by operators"]
    assert len(served) > 150
    assert {entry.name for entry in served if id(entry.value) not in tested} == {*ELSEWHERE}
    for name, place in ELSEWHERE.items():
        file, _, test = place.partition("::")
        source = (ROOT / "tests/compat" / file).read_text()
        assert f"def {test}(" in source and name.removeprefix("LigerFusedLinear") in source, name
