"""Runs the CUDA code of moe_experts, built without a device, and its kernels in Triton's interpreter."""

import ctypes
import traceback

import torch
from interpreter import find, memory
from moe_on_interpreter import LIMIT, SCALES, UP_OFFSET, adapted_inputs, alpha_of, save
from triton.runtime.interpreter import GridExecutor

import liger_ops.kernels.moe.moe_adapters
import liger_ops.kernels.moe.moe_experts
import liger_ops.kernels.moe.moe_rows  # noqa: F401

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "i32": torch.int32}
NAMES = (
    "x", "gate_up", "down", "weight", "gate_up_bias", "down_bias", "gate_up_a", "gate_up_b", "down_a", "down_b"
)  # fmt: skip


class Pointer:
    def __init__(self, address, dtype):
        self.address, self.dtype = address, dtype

    def data_ptr(self):
        return self.address


names = []  # of the kernels that ran
# The size of the memory behind an address is unknown.
GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
GridExecutor._restore_args_dev = lambda *_: None
memory.check = lambda *_, **__: None


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
def run(name, index, programs, arguments):
    try:
        kernel = find(name.decode())
        assert kernel.has_variant(index), f"{kernel.name} has no variant {index}"
        variant = kernel.variant(index)
        names.append(kernel.name)
        values = []
        for argument, kind, offset, size in kernel.layout:
            raw = ctypes.string_at(arguments + offset, size)
            number = int.from_bytes(raw, "little", signed=kind[0] != "*")
            if variant.config.aligned and argument in kernel.aligned:
                assert number % (16 if kind[0] == "*" else 8) == 0, f"{variant.name}: {argument} is {number}"
            if kind[0] == "*" and not argument.endswith("_scratch"):
                values.append(Pointer(number, DTYPES[variant.choices.get(kind[1:], kind[1:])]))
            elif kind[0] != "*":
                values.append(ctypes.c_float.from_buffer_copy(raw).value if kind == "fp32" else number)
        kernel.function[(programs,)](*values, **variant.constexprs)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_host(
    path, library, size, dtype, activation, transposed, interleaved, bias, weight_before, counts, kind, ranks, wide
):
    """As run_adapted, with everything that is launched chosen by C++."""
    torch.ops.load_library(library)
    ctypes.CDLL(library).run_kernels_by(run, 90 if kind == "_hopper" else 80)
    given = adapted_inputs(size, dtype, transposed, bias, counts, ranks, wide)
    tensors = dict(given)
    for name in ("gate_up_bias", "down_bias"):
        tensors[name] = given[name].to(given["x"].dtype) if bias else None
    order = ("x", "gate_up", "down", "index", "weight", *NAMES[4:], "given_dout")
    learned = [i for i, name in enumerate(NAMES) if given.get(name) is not None]
    out, *gradients = torch.ops.experts_on_cpu.experts(
        [tensors.get(name) for name in order], sum(1 << i for i in learned), activation, interleaved, transposed, LIMIT,
        alpha_of(activation), UP_OFFSET, weight_before, *SCALES,
    )  # fmt: skip
    assert ("moe_experts_up_hopper" in names) == (kind == "_hopper" and dtype == "float16")
    results = {"out": out} | {f"d{NAMES[i]}": gradient for i, gradient in zip(learned, gradients, strict=True)}
    save(path, results | {f"in_{k}": v for k, v in given.items()})
