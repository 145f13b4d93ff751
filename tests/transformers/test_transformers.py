"""liger_ops.transformers: patched models of many architectures train as unpatched ones do."""

import collections

import pytest
import torch
from language_models import ARCHITECTURES, clone, make, nodes, step, tokens, train
from patched_models import FUSED, assert_same_logits, assert_same_step

from liger_ops.transformers import apply_liger_kernel, unpatch

pytestmark = pytest.mark.usefixtures("as_large_models")


# In bf16 those whose norms, gates or experts round at different places.
TRAINED = [(name, torch.float32) for name in ARCHITECTURES]
TRAINED += [(name, torch.bfloat16) for name in ("llama", "gemma2", "qwen3_moe", "olmo2", "cohere")]
# Four trainings of one model take a second; every architecture takes a step in test_one_step_and_generation.
QUICK = [("llama", torch.float32), ("gemma2", torch.bfloat16), ("qwen3_moe", torch.bfloat16)]
TRAINED = [pytest.param(*case, marks=[pytest.mark.thorough] * (case not in QUICK)) for case in TRAINED]


@pytest.mark.parametrize("name, dtype", TRAINED, ids=str)
def test_training_is_as_accurate_as_unpatched(name, dtype):
    """Compares the errors of patched and unpatched training, both relative to unpatched training in a wider dtype.

    Rounding errors grow exponentially, so a single training may have a large error: compare geometric means over four
    trainings. The logarithm of the error ratio of one training has a standard deviation of up to 0.56, so that of the
    mean has 0.28. The allowed factor of 4 is five standard deviations."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    errors = {who: collections.defaultdict(lambda: 1.0) for who in ("ours", "eager")}
    trainings = 4
    for seed in range(trainings):
        start = make(name, seed)
        exact, eager = train(clone(start, wide)), train(clone(start, dtype))
        model = clone(start, dtype)
        report = apply_liger_kernel(model)
        assert {"norm", "loss"} <= {row.kind for row in report.replaced} and not report.left_alone
        ours = train(model)
        for who, result in (("ours", ours), ("eager", eager)):
            for key, wanted in exact.items():
                error = float((result[key] - wanted).pow(2).mean().sqrt()) / float(wanted.abs().max())
                errors[who][key] *= error ** (1 / trainings)
    for key, error in errors["ours"].items():
        assert error <= 4 * errors["eager"][key] + torch.finfo(dtype).eps, key
    assert float(ours["losses"][-8:].mean()) < float(ours["losses"][:8].mean()) - 0.05


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_step_and_generation(name):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    model.eval()
    text = model.generate(ids[:1], max_new_tokens=6, do_sample=False)
    logits = model(input_ids=ids).logits
    report = apply_liger_kernel(model)
    model.train()
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(model, ids, plain)
    model.eval()
    assert torch.equal(model.generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    assert_same_logits(model(input_ids=ids).logits, logits, model, ids)
    assert unpatch(model) == len(report.replaced) + 1  # the head has no row
    model.train()
    after = step(model, ids)
    assert torch.equal(after[0], plain[0]) and all(torch.equal(g, plain[1][n]) for n, g in after[1].items())


@pytest.mark.parametrize("weights, dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_dtypes_under_autocast_are_unchanged(weights, dtype):
    model, ids = make("qwen3", dtype=weights), tokens()
    seen = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, i, o: seen.append(o.dtype) if isinstance(o, torch.Tensor) else None)
    model.lm_head._forward_hooks.clear()
    with torch.autocast("cpu", dtype):
        expected = model(input_ids=ids, labels=ids).loss
        before = list(seen)
        apply_liger_kernel(model)
        seen.clear()
        loss = model(input_ids=ids, labels=ids).loss
    # Patched MLPs do not call their activation module.
    activations = sum(type(m).__name__.startswith("SiLU") for m in model.modules())
    assert seen and len(seen) == len(before) - activations and set(seen) == set(before)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    loss.backward()
