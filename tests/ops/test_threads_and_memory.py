"""Norms called from many threads, and the lifetime of their saved tensors."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.checks import equal, path_taken

THREADS = 8

NORMS = {
    "rms_norm": lambda x, w: torch.ops.liger.rms_norm(x, w),
    "layer_norm": lambda x, w: torch.ops.liger.layer_norm(x, w, w),
    "fused_add_rms_norm": lambda x, w: torch.ops.liger.fused_add_rms_norm(x, x.sin(), w),
}


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


def first(out) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def results(norm, x: Tensor, w: Tensor) -> list[Tensor]:
    y = first(norm(x, w))
    return [y, *torch.autograd.grad(y.pow(2).sum(), [x, w])]


def test_concurrent_calls(norm, device):
    torch.manual_seed(0)
    # These widths use different kernels, which the first thread loads.
    made = [[torch.randn(s, device=device, requires_grad=True) for s in ((6, n), (n,))] for n in (40, 264, 1001, 2056)]
    together = Barrier(THREADS)

    def work(_) -> list[list[Tensor]]:
        together.wait()
        return [results(norm, x, w) for _ in range(20) for x, w in made]

    with path_taken(device), ThreadPoolExecutor(THREADS) as pool:
        of_threads = list(pool.map(work, range(THREADS)))
    expected = [results(norm, x, w) for x, w in made] * 20
    assert all(equal(ours, alone) for of_thread in of_threads for ours, alone in zip(of_thread, expected, strict=True))


def test_backward_in_another_thread(norm, device):
    x, w = (torch.randn(s, device=device, requires_grad=True) for s in ((6, 160), (160,)))
    expected = results(norm, x, w)[1:]
    loss = first(norm(x, w)).pow(2).sum()
    with ThreadPoolExecutor(1) as pool:
        assert equal(pool.submit(torch.autograd.grad, loss, [x, w]).result(), expected)


def call_and_track_memory(norm, device, needs_grad: bool) -> tuple[object, Tensor, list[StorageWeakRef]]:
    """The results of a call that holds the only references to x, the weight, and weak references to x and the saved
    tensor."""
    w = torch.randn(160, device=device, requires_grad=needs_grad)
    x = torch.randn(6, 160, device=device, requires_grad=needs_grad) * 2
    out = norm(x, w)
    # fused_add_rms_norm saves the sum that it returns.
    saved = out[1] if isinstance(out, tuple) else x
    return out, w, [StorageWeakRef(t.untyped_storage()) for t in (x, saved)]


def test_without_gradients_nothing_is_saved(norm, device):
    out, _, memory = call_and_track_memory(norm, device, False)
    out = first(out)
    assert all(ref.expired() for ref in memory)


def test_backward_frees_saved_tensors(norm, device):
    out, _, memory = call_and_track_memory(norm, device, True)
    out = first(out)
    assert not memory[1].expired()
    loss = out.sum()
    loss.backward(retain_graph=True)
    assert not memory[1].expired()
    loss.backward()
    assert all(ref.expired() for ref in memory)


def test_a_dropped_graph_frees_saved_tensors(norm, device):
    """A saved result must not form a reference cycle."""
    out, _, memory = call_and_track_memory(norm, device, True)
    del out
    assert all(ref.expired() for ref in memory)


@pytest.mark.gpu
def test_forward_allocates_only_its_results(norm):
    x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in ((8192, 4096), (4096,)))
    norm(x, w)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = norm(x, w)
    outs = out if isinstance(out, tuple) else (out,)
    # The call of fused_add_rms_norm in NORMS allocates the residual.
    expected = sum(o.nbytes for o in outs) + (x.nbytes if len(outs) > 1 else 0)
    statistics = 2 * 8192 * 4
    assert torch.cuda.max_memory_allocated() - before <= expected + statistics + 2**20
