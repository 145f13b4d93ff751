"""Host overhead of a call, compared with torch's own ops on the same tiny tensors."""

from collections.abc import Callable
from itertools import product
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F

ROWS, N = 4, 64
# A call of torch on Meta tensors may take half a millisecond.
CALLS, BATCHES, ATTEMPTS = {"cpu": 100, "meta": 10}, 15, 3
ALLOWED = 1.3
# torch's own ops have a generated argument parser. Ours use the generic one, which shows most for a loss with eight
# arguments and for a lookup of four rows.
ALLOWED_OF = {"cross_entropy": 1.5, "embedding": 1.5}


def rotate(t, cos, sin):
    half = t.shape[-1] // 2
    return t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin


ops = torch.ops.liger
ROW, COLUMN, HEADS, ANGLES = (ROWS, N), (N,), (1, 2, ROWS, N), (1, ROWS, N)
# name -> (ours, torch's, shapes of differentiable inputs, constants)
OPS = {
    "rms_norm": (
        lambda x, w: ops.rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (N,), w, 1e-6),
        [ROW, COLUMN],
        [],
    ),
    "fused_add_rms_norm": (
        lambda x, r, w: ops.fused_add_rms_norm(x, r, w, 1e-6)[0],
        lambda x, r, w: F.rms_norm(x + r, (N,), w, 1e-6),
        [ROW, ROW, COLUMN],
        [],
    ),
    "layer_norm": (
        lambda x, w, b: ops.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (N,), w, b, 1e-5),
        [ROW, COLUMN, COLUMN],
        [],
    ),
    "swiglu": (lambda g, u: ops.swiglu(g, u), lambda g, u: F.silu(g) * u, [ROW, ROW], []),
    "geglu": (lambda g, u: ops.geglu(g, u), lambda g, u: F.gelu(g, approximate="tanh") * u, [ROW, ROW], []),
    "swiglu_linear": (
        lambda g, u, w: ops.swiglu_linear(g, u, w),
        lambda g, u, w: F.linear(F.silu(g) * u, w),
        [ROW, ROW, (N, N)],
        [],
    ),
    "rope": (
        lambda q, cos, sin: ops.rope(q, q, cos, sin)[0],
        lambda q, cos, sin: rotate(q, cos, sin),
        [HEADS],
        [torch.randn(ANGLES), torch.randn(ANGLES)],
    ),
    "qk_norm_rope": (
        lambda q, w, cos, sin: ops.qk_norm_rope(q, q, w, w, cos, sin)[0],
        lambda q, w, cos, sin: rotate(F.rms_norm(q, (N,), w, 1e-6), cos, sin),
        [HEADS, COLUMN],
        [torch.randn(ANGLES), torch.randn(ANGLES)],
    ),
    "embedding": (
        lambda w, indices: ops.embedding(indices, w),
        lambda w, indices: F.embedding(indices, w),
        [ROW],
        [torch.arange(ROWS)],
    ),
    "cross_entropy": (
        lambda x, target: ops.cross_entropy(x, target),
        lambda x, target: F.cross_entropy(x, target),
        [ROW],
        [torch.arange(ROWS)],
    ),
}


def seconds(function: Callable[[], object], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        function()
    return perf_counter() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], calls: int) -> float:
    """Ratio of the fastest batches. Batches alternate, so that a busy machine slows both."""
    pairs = [(seconds(ours, calls), seconds(theirs, calls)) for _ in range(BATCHES)]
    return min(a for a, _ in pairs) / min(b for _, b in pairs)


MODES = [*product(["cpu", "meta"], ["no_grad", "grad", "forward and backward"]), ("cpu", "autocast")]


@pytest.mark.parametrize("device,mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_host_cost(op, mode, device):
    *functions, shapes, constants = OPS[op]
    inputs = [torch.randn(shape, device=device, requires_grad=mode != "no_grad") for shape in shapes]
    constants = [c.to(device) for c in constants]
    dy = torch.ones_like(functions[1](*inputs, *constants))

    def bound(function):
        if mode == "forward and backward":
            return lambda: torch.autograd.grad(function(*inputs, *constants), inputs, dy)
        return lambda: function(*inputs, *constants)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # would fill every result
    allowed = ALLOWED_OF.get(op, ALLOWED)
    try:
        with torch.no_grad() if mode == "no_grad" else torch.autocast("cpu", enabled=mode == "autocast"):
            measured = []
            while not measured or measured[-1] > allowed and len(measured) < ATTEMPTS:
                measured.append(ratio(*map(bound, functions), CALLS[device]))
    finally:
        torch.set_num_threads(threads)
    assert min(measured) <= allowed, measured
