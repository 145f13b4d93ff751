"""cross_entropy under gradcheck, opcheck, torch.compile, export, TorchScript, autocast and CUDA graphs."""

import pytest
import torch
import torch.nn.functional as F
from checks import OPCHECKS, check_export, check_inductor, check_one_graph, check_script
from cross_entropies import EXTRAS, cross_entropy, cross_entropy_, make, overwriting, with_metrics
from torch import Tensor


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("op", [cross_entropy, overwriting])
def test_gradcheck(op, reduction, extras):
    logits, target, weight = make((4, 5), torch.float64, "cpu", torch.float64, scale=1.0)
    assert torch.autograd.gradcheck(lambda x: op(x, target, weight, reduction, **EXTRAS[extras]), [logits])


@pytest.mark.parametrize("op", [cross_entropy, with_metrics, cross_entropy_])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(requires_grad, reduction, op, device):
    logits, target, weight = make((4, 16), torch.float32, device, torch.float32)
    logits = logits.detach().requires_grad_(requires_grad)
    if op is cross_entropy_:
        # A leaf that requires a gradient cannot be overwritten; the compile tests cover non-leaf tensors.
        logits = logits.detach()
    options = dict(label_smoothing=0.1)
    torch.library.opcheck(op.default, (logits, target, weight, reduction), options, test_utils=OPCHECKS)


FORMS = {
    "cross_entropy": lambda x, t, w: cross_entropy(x * 2, t, w, lse_square_scale=1e-3),
    "with_metrics": lambda x, t, w: with_metrics(x * 2, t, w)[0],
    "per token": lambda x, t, w: cross_entropy(x * 2, t, w, "none").square().sum(),
    "cross_entropy_": lambda x, t, w: cross_entropy_(x * 2, t, w) * 3,
}


@pytest.mark.parametrize("form", FORMS)
def test_compile_makes_one_graph_for_all_sizes(form, device):
    calls = [make(shape, torch.float32, device, torch.float32) for shape in [(4, 64), (6, 128), (10, 256)]]
    check_one_graph(FORMS[form], [(inputs, [torch.ones((), device=device)]) for inputs in calls])


@pytest.mark.parametrize("form", FORMS)
def test_inductor(form, device):
    inputs = make((4, 64), torch.float32, device, torch.float32)
    before = inputs[0].detach().clone()
    check_inductor(FORMS[form], inputs, [torch.ones((), device=device)])
    assert torch.equal(inputs[0], before)


class Module(torch.nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return torch.ops.liger.cross_entropy(logits, target, None, "mean", -100, 0.1)


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_op_and_the_batch_dynamic(strict, device):
    inputs, others = ([t.detach() for t in make((rows, 32), torch.float32, device)[:2]] for rows in (4, 9))
    check_export(cross_entropy, Module(), inputs, others, strict)


def test_script(device, tmp_path):
    calls = [make(shape, torch.float32, device)[:2] for shape in [(4, 32), (2, 3, 40)]]
    check_script(Module(), calls, tmp_path / "module.pt")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_meta(reduction):
    logits = torch.empty(5, 3, 64, device="meta", dtype=torch.bfloat16)
    target = torch.empty(5, 3, device="meta", dtype=torch.long)
    rows = torch.Size([5, 3]) if reduction == "none" else torch.Size([])
    loss, z_loss, accuracy, predicted = with_metrics(logits, target, None, reduction)
    assert {t.shape for t in (loss, z_loss, accuracy)} == {rows} and predicted.shape == (5, 3)
    assert (loss.dtype, predicted.dtype, loss.device.type) == (torch.float32, torch.int64, "meta")
    assert cross_entropy_(logits, target, None, reduction).shape == rows


@pytest.mark.gpu
def test_autocast_follows_pytorch():
    logits, target, weight = make((40, 64), torch.bfloat16, "cuda", torch.float32, ignored=0)
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = cross_entropy(logits, target, weight), F.cross_entropy(logits, target, weight)
    assert ours.dtype == theirs.dtype == torch.float32
    # Releases of torch round intermediate results differently, so compare with the loss in float32.
    exact = F.cross_entropy(logits.float(), target, weight)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits)[0] for t in (ours, exact)))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [cross_entropy, with_metrics, overwriting])
def test_no_synchronization_and_cuda_graph_capture(op):
    logits, target, weight = make((64, 1000), torch.bfloat16, "cuda", torch.float32)

    def step():
        out = op(logits, target, weight, label_smoothing=0.1)
        return torch.autograd.grad(out[0] if isinstance(out, tuple) else out, logits)[0]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, expected)
