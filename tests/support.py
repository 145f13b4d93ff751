"""What the op tests share: the oracle comparison, the path assertion, and runs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Sequence

import torch
from torch import Tensor

import liger_ops

ROOT = Path(__file__).resolve().parents[1]
HALF_TYPES = (torch.bfloat16, torch.float16)
CPU_DTYPES = (torch.float32, *HALF_TYPES)

# OpCheck's own list: schema, autograd registration, fake tensor, AOT autograd with dynamic shapes.
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def served_by(device: str) -> str:
    """The path that calls on `device` must take: packs, or JIT where a run points the pack folder elsewhere."""
    if device == "cpu":
        return "cpu"
    return "jit" if "LIGER_OPS_PACK_DIR" in os.environ else "aot"


@contextmanager
def path_taken(device: str):
    """Fails unless the calls inside ran, and on no other path than the one `device` promises."""
    liger_ops.reset_launch_counts()
    yield
    counts = liger_ops.launch_counts()
    used = {path for path, count in counts.items() if count}
    assert used == {served_by(device)}, counts


@torch.no_grad()
def distance(a: Tensor, oracle: Tensor, scale: float = 0.0) -> float:
    """Largest error, relative to the oracle's largest magnitude or to `scale` if that is larger."""
    if a.numel() == 0:
        return 0.0
    largest = max(float(oracle.abs().max()), scale, 1e-30)
    return float((a.double() - oracle.double()).abs().max()) / largest


def assert_no_worse(name: str, ours: Tensor, eager: Tensor, oracle: Tensor, scale: float = 0.0) -> None:
    """Our error against fp64 may be at most what eager PyTorch makes in the same dtype, with half again for a different
    order of summation, and one rounding of the result."""
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    assert ours.dtype == eager.dtype, f"{name}: dtype {ours.dtype}, expected {eager.dtype}"
    error, allowed = distance(ours, oracle, scale), 1.5 * distance(eager, oracle, scale) + torch.finfo(ours.dtype).eps
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def gradients(function: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of every input that requires one."""
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    grads = torch.autograd.grad(outs, wanted, [g.to(o.dtype) for g, o in zip(grads_out, outs)]) if wanted else []
    return [*outs, *grads]


def like(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """A leaf of the same values and strides; `dtype` for floating-point ones."""
    if t is None or not t.is_floating_point():
        return t
    return t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad)


def check_op(op: Callable, reference: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor], device: str) -> None:
    """Outputs and gradients of `op` against the fp64 oracle `reference`, which eager runs in the op's own dtype too."""
    with path_taken(device):
        ours = gradients(op, [like(t) for t in inputs], grads_out)
    eager = gradients(reference, [like(t) for t in inputs], grads_out)
    oracle = gradients(reference, [like(t, torch.float64) for t in inputs], grads_out)
    # A gradient may be a difference of large terms (of one column: exactly zero): the upstream gradient sets its scale.
    scale = max((float(g.abs().max()) for g in grads_out if g.numel()), default=0.0)
    outputs = len(ours) - sum(t is not None and t.requires_grad for t in inputs)
    for i, results in enumerate(zip(ours, eager, oracle)):
        assert_no_worse(f"result {i}", *results, scale=scale if i >= outputs else 0.0)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh interpreter that imports this tree."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)


def output_of(code: str, **env: str) -> str:
    done = run_python(code, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def count_graphs() -> tuple[Callable, list]:
    """A torch.compile backend that runs the graph as it is, and the list in which it counts them."""
    graphs: list = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return backend, graphs
