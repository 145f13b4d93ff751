"""liger_ops.transformers: patched models of many architectures train as unpatched ones do."""

import pytest
import torch

from liger_ops.transformers import apply_liger_kernel, unpatch
from liger_ops.transformers.coverage import NO_OPERATOR
from tests.support.models.language_models import ARCHITECTURES, make, nodes, step, tokens, train
from tests.support.models.patched_models import (
    FUSED,
    assert_same_logits,
    assert_same_step,
    assert_training_is_as_accurate,
)

pytestmark = pytest.mark.usefixtures("as_large_models")


# In bf16 those whose norms, gates or experts round at different places.
TRAINED = [(name, torch.float32) for name in ARCHITECTURES]
TRAINED += [(name, torch.bfloat16) for name in ("llama", "gemma2", "qwen3_moe", "olmo2", "cohere")]
# Four trainings of one model take a second; every architecture takes a step in test_one_step_and_generation.
QUICK = [("llama", torch.float32), ("qwen3_moe", torch.bfloat16)]
TRAINED = [pytest.param(*case, marks=[pytest.mark.thorough] * (case not in QUICK)) for case in TRAINED]


@pytest.mark.parametrize("name, dtype", TRAINED, ids=str)
def test_training_is_as_accurate_as_unpatched(name, dtype):
    def patched(model):
        report = apply_liger_kernel(model)
        assert {"norm", "loss"} <= {row.kind for row in report.replaced}
        assert {row.reason for row in report.left_alone} <= {NO_OPERATOR}  # softmax routers
        return train(model)

    _, ours = assert_training_is_as_accurate(lambda seed: make(name, seed), train, patched, dtype, trainings=4)
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
        # Patched MLPs with a hooked activation run their own forward.
        if not list(module.children()) and not type(module).__name__.startswith("SiLU"):
            module.register_forward_hook(lambda m, i, o: seen.append(o.dtype) if isinstance(o, torch.Tensor) else None)
    model.lm_head._forward_hooks.clear()
    with torch.autocast("cpu", dtype):
        expected = model(input_ids=ids, labels=ids).loss
        before = list(seen)
        apply_liger_kernel(model)
        seen.clear()
        loss = model(input_ids=ids, labels=ids).loss
    assert seen and len(seen) == len(before) and set(seen) == set(before)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    loss.backward()
