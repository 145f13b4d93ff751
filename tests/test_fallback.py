"""The operators registered from Python, as a torch meets them that no operator library was built for.

The copy of the package that lacks the library runs in processes of its own, which import this file too.
"""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest
import torch
from support import OPCHECKS, assert_no_worse, check_one_graph, gradients, path_taken

import liger_ops

TESTS = Path(__file__).parent
PACKAGE = Path(liger_ops.__file__).parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with a package: the runtime, an operator library for another torch, and a broken one for this."""
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, root / "liger_ops", ignore=shutil.ignore_patterns("lib", "packs", "__pycache__"))
    (root / "liger_ops" / "packs").symlink_to(PACKAGE / "packs")
    libraries = root / "liger_ops" / "lib"
    libraries.mkdir()
    shutil.copy(PACKAGE / "lib" / "libliger_runtime.so", libraries)
    for minor in ("1.0", liger_ops._loader.torch_minor()):
        (libraries / f"libliger_ops_torch{minor}.so").write_bytes(b"not a library")
    return root


def call(copy: Path, function: str, *args: object) -> None:
    """Calls a function of this file where the operators come from Python."""
    code = "import liger_ops; assert liger_ops._loaded.library is None, liger_ops.__file__\n"
    code += f"import test_fallback; test_fallback.{function}(*{tuple(map(str, args))})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(TESTS)])}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", code]
    # The working directory comes before PYTHONPATH.
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- The warning


def test_the_warning_is_given_once_and_lists_what_was_tried(copy):
    code = "import liger_ops, torch; torch.ops.liger.rms_norm(torch.ones(2, 8)); import liger_ops._loader"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert len(said) == 1, done.stderr
    minor = liger_ops._loader.torch_minor()
    for part in (
        f"no operator library fits torch {torch.__version__}",
        f"libliger_ops_torch1.0.so built for torch 1.0, installed is {torch.__version__}",
        f"libliger_ops_torch{minor}.so did not load: ",
        "pip install --no-build-isolation .",
    ):
        assert part in said[0]


# ---- The same names and schemas


def public_schemas() -> dict[str, str]:
    names = [
        name.removeprefix("liger::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")
    ]
    return {name: str(getattr(torch.ops.liger, name).default._schema) for name in names if not name.startswith("_")}


def write_schemas(path: str) -> None:
    torch.save(public_schemas(), path)


def test_schemas_are_those_of_the_library(copy, tmp_path):
    call(copy, "write_schemas", tmp_path / "schemas")
    assert torch.load(tmp_path / "schemas") == public_schemas()


# ---- The same results


def calls(device: str) -> Iterator[tuple]:
    """(name, function, inputs, gradients of its outputs) over the norms: options, layouts, empties, frozen inputs."""
    ops, generator = torch.ops.liger, torch.Generator().manual_seed(0)

    def randn(shape, dtype, requires_grad=True):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(requires_grad)

    dtypes = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    for (dtype, parameter_dtype), shape, n in itertools.product(dtypes, [(2, 3), (0,)], [64, 131, 2560, 40_000]):
        x, residual, dy, ds = (randn((*shape, n), dtype) for _ in range(4))
        dy, ds = dy.detach(), ds.detach()
        w, b = (randn(n, parameter_dtype) for _ in range(2))
        name = f"{shape} x {n}, {dtype}, parameters {parameter_dtype}"
        for options in (
            dict(casting_mode="llama"),
            dict(casting_mode="gemma", offset=1.0, eps=1e-5),
            dict(casting_mode="none"),
        ):
            for weight in (w, w.detach(), None):
                plain = lambda x, w, options=options: ops.rms_norm(x, w, **options)  # noqa: E731
                fused = lambda x, r, w, options=options: ops.fused_add_rms_norm(x, r, w, **options)  # noqa: E731
                yield f"rms_norm {options}, {name}", plain, [x, weight], [dy]
                yield f"fused_add_rms_norm {options}, {name}", fused, [x, residual, weight], [dy, ds]
        for weight, bias in itertools.product((w, w.detach(), None), (b, b.detach(), None)):
            yield f"layer_norm, {name}", lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), [x, weight, bias], [dy]
        t, dt = randn((n, 6), dtype).detach().t().requires_grad_(), randn((n, 6), dtype, False).t()
        yield f"rms_norm, transposed, {name}", ops.rms_norm, [t, w], [dt]
        yield f"fused_add_rms_norm, transposed, {name}", ops.fused_add_rms_norm, [t, t.detach(), w], [dt, dt]
        yield f"layer_norm, transposed, {name}", ops.layer_norm, [t, w, b], [dt]


def write_results(path: str, device: str) -> None:
    with path_taken(device):
        results = [[t.detach().cpu() for t in gradients(*rest)] for _, *rest in calls(device)]
    torch.save(results, path)


def test_results_are_those_of_the_library(copy, tmp_path, device):
    call(copy, "write_results", tmp_path / "results", device)
    count = 0
    for theirs, (name, function, inputs, grads_out) in zip(
        torch.load(tmp_path / "results"), calls(device), strict=True
    ):
        ours = [t.detach().cpu() for t in gradients(function, inputs, grads_out)]
        double = [None if t is None else t.detach().cpu().double().requires_grad_(t.requires_grad) for t in inputs]
        exact = gradients(function, double, [g.cpu() for g in grads_out])
        scale = max((float(g.abs().max()) for g in grads_out if g.numel()), default=0.0)
        assert len(ours) == len(theirs)
        for i, results in enumerate(zip(theirs, ours, exact)):
            assert_no_worse(f"{name}, result {i}", *results, scale=scale)
        count += 1
    assert count > 0


# ---- The same manners


def examples(device: str) -> list[tuple]:
    def randn(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    def transposed(*shape):
        return torch.randn(shape[::-1], device=device).t().requires_grad_()

    ops = torch.ops.liger
    return [
        example
        for rows in (randn, transposed)
        for example in (
            (ops.rms_norm, (rows(4, 16), randn(16))),
            (ops.rms_norm, (rows(4, 16), None)),
            (ops.fused_add_rms_norm, (rows(4, 16), rows(4, 16), randn(16))),
            (ops.layer_norm, (rows(4, 16), randn(16), randn(16))),
            (ops.layer_norm, (rows(4, 16), None, randn(16))),
        )
    ]


def check_opcheck(device: str) -> None:
    for op, inputs in examples(device):
        torch.library.opcheck(op.default, inputs, test_utils=OPCHECKS)
        torch.library.opcheck(op.default, tuple(t if t is None else t.detach() for t in inputs), test_utils=OPCHECKS)


def test_opcheck(copy, device):
    call(copy, "check_opcheck", device)


def check_compile(device: str) -> None:
    for op, inputs in examples(device):
        outputs = 2 if op is torch.ops.liger.fused_add_rms_norm else 1

        def sized(rows, n, inputs=inputs):
            shapes = [None if t is None else (rows, n)[2 - t.dim() :] for t in inputs]
            return [
                None if shape is None else torch.randn(shape, device=device, requires_grad=True) for shape in shapes
            ]

        sizes = [(4, 64), (6, 128), (10, 256)]
        made = [(sized(*size), [torch.randn(size, device=device)] * outputs) for size in sizes]

        def double(*inputs, op=op):
            out = op(*inputs)
            return tuple(o * 2 for o in out) if isinstance(out, tuple) else out * 2

        torch._dynamo.reset()
        check_one_graph(double, made)


def test_compile_makes_one_graph_for_all_sizes(copy, device):
    call(copy, "check_compile", device)


def check_refusals() -> None:
    ones, ops = torch.ones, torch.ops.liger
    for op, inputs in (
        (ops.rms_norm, (ones(2, 8, dtype=torch.long),)),
        (ops.rms_norm, (ones(2, 8), ones(7))),
        (ops.rms_norm, (ones(2, 8), None, -1.0)),
        (ops.rms_norm, (ones(2, 8), None, 1e-6, 0.0, "no")),
        (ops.fused_add_rms_norm, (ones(2, 8), ones(8))),
        (ops.fused_add_rms_norm, (ones(2, 8), ones(2, 8).half())),
        (ops.layer_norm, (torch.tensor(1.0),)),
        (ops.layer_norm, (ones(2, 8), ones(8).half())),
        (ops.layer_norm, (ones(2, 8).half(), ones(8).half(), ones(8))),
        (ops.layer_norm, (ones(2, 8), None, None, float("inf"))),
    ):
        name = op.default.name().removeprefix("liger::")
        with pytest.raises(RuntimeError, match=rf"{name}: \w+ must .* \(got "):
            op(*inputs)
    for op, inputs in examples("cpu"):
        out = op(*inputs)
        grads = torch.autograd.grad((out if isinstance(out, tuple) else (out,))[0].sum(), inputs[0], create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(grads[0].square().sum(), inputs[0])


def test_bad_input_is_refused(copy):
    call(copy, "check_refusals")
