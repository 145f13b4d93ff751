"""Helpers that the operator tests share: comparison with an fp64 oracle, checks of autograd, torch.compile, export and
TorchScript, and code that runs in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops
from liger_ops._accuracy import (
    OF_EAGER,
    Roundings,
    compute_dtype,
    distance,
    gradients,
    judged,
    like,
    rounded,
    roundings,
)
from tests.support.host.fork_server import Fork
from tests.support.layouts import expanded, offset, sliced, strided

ROOT = Path(__file__).resolve().parents[2]
# As the tests were started. torch.compile sets it too, perhaps to a folder that only this process uses.
INDUCTOR_CACHE = {k: v for k, v in os.environ.items() if k == "TORCHINDUCTOR_CACHE_DIR"}
HALF_TYPES = (torch.bfloat16, torch.float16)
CPU_DTYPES = (torch.float32, *HALF_TYPES)

# The list of torch.library.opcheck: schema, autograd registration, fake tensor, AOT autograd with dynamic shapes.
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

# Layouts of a (batch, heads, sequence, columns) tensor for an op on rows.
LAYOUTS = {
    "slice of a fused projection": lambda x: sliced(x, -1),
    "heads of a fused projection": lambda x: sliced(x, 1),
    "transposed heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided last dimension": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "misaligned": lambda x: offset(x, 1),
    "expanded": lambda x: expanded(x, 0),
    "every other row": lambda x: strided(x, 2),
}


def sizes_around_tiles(*kernels: str) -> list[int]:
    """Widths on both sides of each boundary between configs of these kernels, aligned and unaligned."""
    from liger_ops.kernels import find

    sizes = set()
    for config in (c for name in kernels for c in find(name).configs if c.max_n is not None):
        sizes |= {config.max_n, config.max_n + 8} if config.aligned else {config.max_n - 1, config.max_n + 1}
    return sorted(sizes)


def more_rows_than_any_limit(*kernels: str) -> int:
    """One row more than the largest max_rows among the configs of these kernels."""
    from liger_ops.kernels import find

    return 1 + max(config.max_rows or 0 for name in kernels for config in find(name).configs)


ROWS_AND_PARAMETERS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.bfloat16, torch.float32),
]


def served_by(device: str) -> str:
    """The path that calls on `device` must take: AOT packs; if LIGER_OPS_PACK_DIR is set, JIT, or PTX without JIT."""
    if "LIGER_OPS_INTERPRET" in os.environ:
        return "jit"
    if device == "cpu":
        return "cpu"
    if "LIGER_OPS_PACK_DIR" not in os.environ:
        return "aot"
    return "ptx" if os.environ.get("LIGER_OPS_JIT") == "0" else "jit"


def has_hopper_kernels() -> bool:
    """Kernels for compute capability 9.0 alone have no PTX."""
    return torch.cuda.get_device_capability() == (9, 0) and served_by("cuda") != "ptx"


@contextmanager
def path_taken(device: str):
    """Fails unless the enclosed calls launched kernels, all of them on the expected path of `device`."""
    liger_ops.reset_launch_counts()
    yield
    counts = liger_ops.launch_counts()
    used = {path for path, count in counts.items() if count}
    # Without the library, reference formulas run and launch nothing.
    assert used == ({served_by(device)} if liger_ops._loaded.library else set()), counts


def assert_no_worse(
    name: str,
    ours: Tensor,
    eager: Tensor,
    oracle: Tensor,
    scale: float = 0.0,
    noise: float = 0.0,
    bounds: tuple[Roundings, int] | None = None,
) -> None:
    """Our error against fp64 may be as large as `judged` allows."""
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    assert ours.dtype == eager.dtype, f"{name}: dtype {ours.dtype}, expected {eager.dtype}"
    error, allowed = judged(ours, eager, oracle, scale, noise, bounds)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@torch.no_grad()
def overall_error(found: Tensor, exact: Tensor) -> float:
    """The root mean square error, relative to what is exact. It depends on chance much less than the largest error does."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def assert_no_worse_overall(
    ours: Iterable[Tensor], eager: Iterable[Tensor], oracle: Sequence[Tensor], factor: float = OF_EAGER
) -> None:
    """As assert_no_worse, for the error of all numbers of a result, the largest of all results. It leaves little to chance, so
    nothing is added to eager's error."""
    error, theirs = (max(map(overall_error, found, oracle)) for found in (ours, eager))
    assert error <= factor * theirs, f"overall error {error:.3g}, allowed {factor * theirs:.3g}"


def assert_as_the_formula(
    ours: Iterable[tuple[str, Tensor]], formula: Callable[..., Mapping[str, Tensor]], inputs: Sequence[Tensor],
    precision: torch.dtype | None = None, scales: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """ours: a result's name in the formula, and what was computed. Its error against fp64 may be that of the formula in
    fp32, its own rounding, or what roundings of the inputs do, see assert_no_worse. precision: that of intermediate
    results, if it is not that of sums. scales: of results that may be differences of larger terms."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    precision = precision or compute_dtype(leaves)
    exact, eager = (formula(*(like(t, dtype) for t in leaves)) for dtype in (torch.float64, compute_dtype(leaves)))

    def of_rounded(draw: int) -> list[Tensor]:
        found = formula(*rounded(leaves, precision, draw))
        return [found[name].detach() for name in exact]

    bounds = Roundings([t.detach() for t in exact.values()], of_rounded, leaves, precision, smooth=True)
    for name, t in ours:
        truth, i = exact[name].detach(), [*exact].index(name)
        theirs, scale = eager[name].detach().to(t.dtype), (scales or {}).get(name, 0.0)
        assert_no_worse(name, t, theirs, truth, scale, bounds=(bounds, i))


def assert_most_digits(ours: Sequence[Tensor], theirs: Sequence[Tensor], scale: float = 1.0) -> None:
    """Two codes of a long formula, whose ratios and differences lose digits: two thirds of them agree, as Roundings demands
    at least."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape, f"result {i}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        error, allowed = distance(a, b, scale), torch.finfo(compute_dtype([a])).eps ** (2 / 3)
        assert error <= allowed, f"result {i}: error {error:.3g}, allowed {allowed:.3g}"


def coarseness(dtype: torch.dtype, oracle: Tensor) -> float:
    """Spacing of subnormal numbers, relative to the oracle's largest magnitude. Matters for fp16 values below 6e-5."""
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return smallest / max(float(oracle.abs().max()), smallest) if oracle.numel() else 0.0


def check_op(
    op: Callable,
    reference: Callable,
    inputs: Sequence[Tensor | None],
    grads_out: Sequence[Tensor],
    device: str,
    terms: float = 0.0,
    noise: float = 0.0,
    precision: torch.dtype | None = None,
) -> None:
    """Compares outputs and gradients of `op` with `reference` in fp64. The error of `reference` in the op's own dtype
    sets the tolerance. terms: magnitude of the terms of which gradients are differences, if it may be larger than that
    of the upstream gradients. noise: see judged. precision: see roundings."""
    with path_taken(device):
        ours = gradients(op, [like(t) for t in inputs], grads_out)
    check_results(ours, reference, inputs, grads_out, terms, noise, precision)


def check_results(
    ours: Sequence[Tensor],
    reference: Callable,
    inputs: Sequence[Tensor | None],
    grads_out: Sequence[Tensor],
    terms: float = 0.0,
    noise: float = 0.0,
    precision: torch.dtype | None = None,
) -> None:
    """As check_op, for outputs and gradients that are there already."""
    eager = gradients(reference, [like(t) for t in inputs], grads_out)
    oracle = gradients(reference, [like(t, torch.float64) for t in inputs], grads_out)
    bounds = roundings(reference, inputs, grads_out, oracle, precision)
    # The upstream gradient sets the scale: a gradient may be a difference of large terms (exactly zero for one column).
    scale = max([terms, *(float(g.abs().max()) for g in grads_out if g.numel())])
    outputs = len(ours) - sum(t is not None and t.requires_grad for t in inputs)
    for i, results in enumerate(zip(ours, eager, oracle)):
        assert_no_worse(f"result {i}", *results, scale=scale if i >= outputs else 0.0, noise=noise, bounds=(bounds, i))


def record_calls(monkeypatch: pytest.MonkeyPatch, name: str, result: Any) -> list[dict[str, Any]]:
    """Replaces an operator by one that records its arguments by name and returns `result` for each output. Returns the
    list of recorded calls."""
    schema, calls = getattr(torch.ops.liger, name).default._schema, []

    def recorder(*arguments: Any, **options: Any) -> Any:
        calls.append(dict(zip((a.name for a in schema.arguments), arguments)) | options)
        return result if len(schema.returns) == 1 else (result,) * len(schema.returns)

    monkeypatch.setattr(torch.ops.liger, name, recorder)
    return calls


def wanted_of(inputs: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in inputs if t is not None and t.requires_grad]


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


def check_deterministic(op: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]) -> None:
    assert equal(gradients(op, inputs, grads_out), gradients(op, inputs, grads_out))


def check_reads_only(op: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]) -> None:
    given = [t for t in (*inputs, *grads_out) if t is not None]
    before = [(t.detach().clone(), t._version) for t in given]
    gradients(op, inputs, grads_out)
    assert all(torch.equal(t, value) and t._version == version for t, (value, version) in zip(given, before))


def check_no_synchronization(step: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Returns the results of the step."""
    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return expected


def check_replays(step: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> None:
    """The step, captured in a CUDA graph, gives its results in every replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert equal(captured, expected)


def check_second_backward(op: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]) -> None:
    """retain_graph=True permits a second backward; without it, the second backward raises."""
    out = op(*inputs)
    outs = [o * 1.0 for o in (out if isinstance(out, tuple) else (out,))]
    first = torch.autograd.grad(outs, wanted_of(inputs), grads_out, retain_graph=True)
    assert equal(first, torch.autograd.grad(outs, wanted_of(inputs), grads_out))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outs, wanted_of(inputs), grads_out)


def check_no_double_backward(
    name: str, op: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]
) -> None:
    wanted, out = wanted_of(inputs), op(*inputs)
    for gradient in torch.autograd.grad(out, wanted, grads_out, create_graph=True):
        if any(gradient.is_set_to(given) for given in grads_out):
            continue  # the incoming gradient has a history of its own
        with pytest.raises(RuntimeError, match=f"{name}: double backward is not supported"):
            torch.autograd.grad(gradient.sum(), wanted[0], retain_graph=True)


def check_one_graph(function: Callable, calls: Iterable[tuple[Sequence[Tensor | None], Sequence[Tensor]]]) -> None:
    """torch.compile makes one graph for calls of different sizes, with the results of eager."""
    backend, graphs = count_graphs()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for inputs, grads_out in calls:
        assert equal(gradients(compiled, inputs, grads_out), gradients(function, inputs, grads_out))
    assert len(graphs) == 1


def check_inductor(function: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]) -> None:
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for ours, theirs in zip(gradients(compiled, inputs, grads_out), gradients(function, inputs, grads_out)):
        torch.testing.assert_close(ours, theirs)


class RecordAddress(torch.autograd.Function):
    """Copies x into a tensor that only its consumer references, and records the address of its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, addresses: list) -> Tensor:
        ctx.addresses = addresses
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.addresses.append(gradient.data_ptr())
        return gradient, None


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Runs code in a new Python process that imports this source tree."""
    environment = environment_of_tree(**env)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)


def run_forked(code: str, imports: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess:
    """As run_python, at a fraction of the time, in a process that has imported torch, liger_ops and `imports`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        fork = Fork(code, out, err, imports, **env)
        try:
            fork.receive(time.monotonic() + 600)
        finally:
            fork.close()
        if fork.returncode is None:
            raise subprocess.TimeoutExpired("fork", 600)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess("fork", fork.returncode, out.read(), err.read())


def environment_of_tree(**env: str) -> dict[str, str]:
    """Environment variables with which Python imports this source tree and its test helpers."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    return {**own, **INDUCTOR_CACHE, "PYTHONPATH": path, **env}


def output_of(code: str, **env: str) -> str:
    return successful(run_python(code, **env))


def forked_output_of(code: str, imports: Sequence[str] = (), **env: str) -> str:
    return successful(run_forked(code, imports, **env))


def successful(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def autocast_of_fake_gpus() -> Iterator[None]:
    """Tensors are made without memory, and CUDA autocast runs on them without a GPU. torch.autocast would want one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)


def count_graphs() -> tuple[Callable, list]:
    """A torch.compile backend that runs graphs unchanged, and the list to which it adds each graph."""
    graphs: list = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return backend, graphs
