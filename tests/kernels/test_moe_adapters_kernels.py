"""The kernels of moe_experts with adapters, in Triton's interpreter on CPU tensors. And the C++ code that launches them."""

import numpy as np
import pytest
import torch
from checks import ROOT, assert_no_worse, run_python
from interpreted import cases
from stub_cuda import LIBRARIES

from liger_ops import functional as F

INTERPRETED = """
import liger_ops.kernels.moe.moe_adapters
import liger_ops.kernels.moe.moe_rows
from moe_on_interpreter import run_adapted as run
"""
# size, dtype, activation, transposed, interleaved, bias, weight_before, counts, kind, ranks, whether adapters are in fp32
QUICK = [
    ((70, 16, 24, 3, 2), "float32", "silu", False, False, False, False, (), "", (8, 16), True),
    ((33, 16, 8, 5, 2), "float32", "silu", True, True, True, False, (), "", (3, 20), True),
    ((33, 7, 5, 3, 2), "float32", "gelu", True, False, False, True, (), "", (1, 4), True),
    ((150, 16, 8, 4, 1), "float32", "silu", False, False, True, False, (131, 0, 7, 3), "", (8, 8), True),
    ((70, 72, 136, 3, 2), "float16", "silu", False, True, False, False, (), "_hopper", (16, 8), True),
    ((40, 72, 136, 3, 2), "float16", "gelu", True, False, True, False, (), "_hopper", (24, 40), False),
    ((40, 72, 136, 3, 2), "float16", "silu", False, False, False, False, (), "pieces", (24, 16), True),
    ((70, 16, 24, 3, 2), "float32", "silu", False, False, False, False, (), "grouped GEMM", (8, 4), True),
]
THOROUGH = [
    ((40, 72, 136, 3, 2), "float16", "silu", True, True, False, True, (), "_hopper", (8, 8), False),
    ((70, 72, 136, 3, 2), "float16", "silu", False, False, True, False, (), "", (8, 40), True),
    ((20, 7, 5, 3, 2), "float16", "silu", False, False, True, False, (), "", (3, 8), False),
    ((40, 16, 8, 3, 1), "float32", "silu", True, True, False, False, (0, 30, 1), "grouped GEMM", (40, 8), True),
]
ADAPTERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")


def check(case, got):
    _, _, activation, transposed, interleaved, bias, weight_before, counts, _, _, _ = case
    options = dict(
        activation=activation, transposed=transposed, interleaved=interleaved, limit=0.75,
        alpha=1.5 if activation == "silu" else 1.0, up_offset=0.25, gate_up_scale=0.75, down_scale=2.0,
    )  # fmt: skip
    options |= {} if counts else dict(weight_before=weight_before)
    formula = (F.moe_experts_sorted if counts else F.moe_experts).reference
    names = ["x", "gate_up", "down", *ADAPTERS]
    names += ([] if counts else ["weight"]) + (["gate_up_bias", "down_bias"] if bias else [])
    dtype = got["in_x"].dtype

    def run(wide):
        # The kernels take biases and weights of routes in fp32.
        tensors = {n: got[f"in_{n}"].to(wide or (got[f"in_{n}"].dtype if n in ADAPTERS else dtype)) for n in names}
        tensors = {n: t.requires_grad_() for n, t in tensors.items()}
        out = formula(**tensors, **{"tokens_per_expert" if counts else "index": got["in_index"]}, **options)
        found = torch.autograd.grad(out, [*tensors.values()], got["in_given_dout"].to(out.dtype))
        return {"out": out} | {f"d{n}": g for n, g in zip(tensors, found)}

    eager, oracle = run(None), run(torch.float64)
    for name in oracle:
        assert_no_worse(name, got[name].to(eager[name].dtype), eager[name], oracle[name])


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    check(case, interpreted)


# ---- What C++ launches


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """moe_experts_cuda.cpp, without a device."""
    from torch.utils.cpp_extension import load

    folder = tmp_path_factory.mktemp("moe_experts_on_cpu")
    headers = ROOT.glob("build/cpython*/generated/kernels/moe_adapters.h")
    generated = max(headers, key=lambda path: path.stat().st_mtime).parents[1]
    load(
        "moe_experts_on_cpu",
        [str(ROOT / "tests/support/moe_experts_on_cpu.cpp")],
        extra_include_paths=[str(ROOT / "csrc"), str(generated)],
        extra_cflags=["-std=c++20", "-O1", "-fvisibility=hidden"],
        extra_ldflags=[str(LIBRARIES / "libliger_runtime.so"), f"-Wl,-rpath,{LIBRARIES}"],
        build_directory=str(folder),
        is_python_module=False,
    )
    return str(folder / "moe_experts_on_cpu.so")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [c for c in QUICK + THOROUGH if c[8] in ("", "_hopper")], ids=lambda case: "-".join(map(str, case))
)
def test_kernels_as_the_host_launches_them(case, library, tmp_path):
    path = str(tmp_path / "results.npz")
    code = f"from moe_on_host import run_host\nrun_host({path!r}, {library!r}, *{case!r})"
    done = run_python(code, TRITON_INTERPRET="1")
    assert not done.returncode, done.stdout + done.stderr
    with np.load(path) as arrays:
        check(case, {name: torch.from_numpy(array) for name, array in arrays.items()})
