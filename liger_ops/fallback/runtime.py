"""The torch-free runtime through ctypes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).parents[1] / "lib" / "libliger_runtime.so"
TRITON_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
STRUCT_CODES = {"i32": "i", "i64": "q", "fp32": "f"}

REPLY = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int, REPLY, ctypes.c_void_p)


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(LIBRARY))
    for name in ("liger_launch", "liger_status", "liger_preload"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def raise_if(message: bytes | None, op: str) -> None:
    if message:
        raise RuntimeError(f"{op}: {message.decode()}")


def status() -> str:
    return library().liger_status().decode()


def reset_counts() -> None:
    library().liger_reset_counts()


def count_cpu_call() -> None:
    library().liger_count_cpu_call()


def preload(device: int, ops: list[str]) -> tuple[int, int]:
    loaded, missing = ctypes.c_int64(), ctypes.c_int64()
    names = (ctypes.c_char_p * len(ops))(*(op.encode() for op in ops))
    raise_if(library().liger_preload(device, names, len(ops), ctypes.byref(loaded), ctypes.byref(missing)), "preload")
    return loaded.value, missing.value


def enable_jit(compiler: str) -> None:
    def compile_kernel(kernel, variant, capability, reply, context):
        from .._jit import compile_pack

        try:
            packed = compile_pack(kernel.decode(), variant, capability)
            reply(packed, len(packed), context)
        except Exception as error:
            reply(str(error).encode(), -1, context)

    # ctypes does not keep a callback alive.
    enable_jit.hook = HOOK(compile_kernel)
    library().liger_set_compile_hook(compiler.encode(), enable_jit.hook)


def dtype_name(tensor: torch.Tensor) -> str:
    return TRITON_DTYPES[tensor.dtype]


def multiprocessors(tensor: torch.Tensor) -> int:
    return max(1, library().liger_multiprocessors(tensor.device.index))


def configs(name: str) -> list[Any]:
    from ..kernels import find

    return list(find(name).configs)


def addresses_and_numbers(args: Mapping[str, Any]) -> dict[str, int | float]:
    return {k: (v.data_ptr() if isinstance(v, torch.Tensor) else 0 if v is None else v) for k, v in args.items()}


def is_aligned(kernel: Any, values: Mapping[str, int | float]) -> bool:
    """Whether these arguments are what an aligned config assumes."""
    return all(values[k] % (16 if kernel.args[k][0] == "*" else 8) == 0 for k in kernel.aligned)


def pack_arguments(kernel: Any, values: Mapping[str, int | float]) -> bytes:
    """A kernel's parameter buffer, the two scratch pointers at its end null."""
    packed = bytearray(kernel.layout[-1][2] + kernel.layout[-1][3])
    for argument, kind, offset, _ in kernel.layout[:-2]:
        struct.pack_into("Q" if kind[0] == "*" else STRUCT_CODES[kind], packed, offset, values[argument])
    return bytes(packed)


def launch(
    op: str,
    name: str,
    choices: Mapping[str, Any],
    width: int,
    grid: Callable[[Any], tuple[int, int, int]],
    args: Mapping[str, Any],
    device: torch.device,
    may_be_aligned: bool = True,
) -> None:
    """Launches the variant that the kernel's table picks for rows of `width`. Tensors in `args` pass as addresses."""
    from ..kernels import find

    kernel = find(name)
    values = addresses_and_numbers(args)
    variant = kernel.pick(choices, width, may_be_aligned and is_aligned(kernel, values), values.get("rows"))
    packed = pack_arguments(kernel, values)
    stream = torch.cuda.current_stream(device).cuda_stream
    x, y, z = grid(variant.config)
    with torch.cuda.device(device):
        message = library().liger_launch(
            name.encode(),
            variant.index,
            device.index,
            ctypes.c_void_p(stream),
            x,
            y,
            z,
            packed,
            ctypes.c_uint64(len(packed)),
        )
    raise_if(message, op)


def column_sum(op: str, partial: torch.Tensor, *outs: torch.Tensor) -> None:
    """partial: (outputs, rows, n) fp32, summed over rows into outs."""
    outputs, rows, n = partial.shape
    args = dict(out0=outs[0], out1=outs[1] if outputs > 1 else None, partial=partial, rows=rows, n=n)
    grid = lambda config: (-(-n // config.constexprs["BLOCK_N"]), outputs, 1)  # noqa: E731
    launch(op, "column_sum", {"W": dtype_name(outs[0])}, n, grid, args, partial.device)
