"""verl's fused kernels give the same results with liger_ops.integrations.verl as without."""

import pytest
import torch

from tests.support.checks import assert_no_worse
from tests.support.host.solo_group import solo_group

pytestmark = pytest.mark.verl


@pytest.fixture
def ours():
    from liger_ops.integrations import verl

    yield verl
    verl.unpatch()


def results(function, hidden, weight, dtype):
    hidden, weight = (t.to(dtype).requires_grad_() for t in (hidden, weight))
    log_probs, entropy = function(hidden, weight)
    loss = (log_probs * torch.linspace(-1, 1, log_probs.numel()).view(log_probs.shape)).sum() - 0.1 * entropy.sum()
    return [log_probs, entropy, *torch.autograd.grad(loss, (hidden, weight))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40,), (4, 10)])
def test_fused_linear_for_ppo(ours, shape, dtype):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    hidden, weight, ids = torch.randn(*shape, 16), torch.randn(67, 16) * 0.4, torch.randint(67, shape)
    found = results(lambda h, w: ours.FusedLinearForPPO()(h, w, ids, 0.7), hidden, weight, dtype)
    theirs = results(lambda h, w: FusedLinearForPPO(16)(h, w, ids, 0.7), hidden, weight, dtype)
    truth = results(lambda h, w: ours.FusedLinearForPPO()(h, w, ids, 0.7), hidden, weight, torch.float64)
    for i, triple in enumerate(zip(found, theirs, truth)):
        assert_no_worse(f"result {i}", *triple)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_cross_entropy(ours, reduction):
    """verl's own runs on GPUs alone: compared with the formula."""
    solo_group()
    hidden, weight, labels = torch.randn(4, 10, 16), torch.randn(67, 16), torch.randint(67, (4, 10))
    log_probs, entropy = ours.linear_cross_entropy(
        hidden, weight, labels, 0.7, reduction, torch.distributed.group.WORLD
    )
    logs = (hidden.view(40, 16) @ weight.T / 0.7).log_softmax(-1)
    expected = logs.gather(1, labels.view(40, 1)).squeeze(1)
    expected = expected if reduction == "none" else getattr(expected, reduction)()
    torch.testing.assert_close((log_probs, entropy), (expected, -(logs.exp() * logs).sum(-1)))
    with pytest.raises(ValueError, match="reduction must be none, sum or mean"):
        ours.linear_cross_entropy(hidden, weight, labels, 0.7, "max")


def test_patch_and_unpatch(ours):
    import verl.utils.experimental.torch_functional as ppo
    import verl.utils.kernel.linear_cross_entropy as kernel

    theirs = ppo.FusedLinearForPPO, kernel.linear_cross_entropy
    report = ours.patch()
    assert (ppo.FusedLinearForPPO, kernel.linear_cross_entropy) == (ours.FusedLinearForPPO, ours.linear_cross_entropy)
    assert len(report.replaced) == 2 and "logprobs_from_logits" in str(report)
    ours.unpatch()
    assert (ppo.FusedLinearForPPO, kernel.linear_cross_entropy) == theirs
