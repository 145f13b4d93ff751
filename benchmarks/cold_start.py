"""python -m benchmarks.cold_start OP PROVIDER DEVICE: seconds from the import of a provider to its first finished step."""

import os
import sys
import time

import torch

from benchmarks.op import Make
from benchmarks.providers import load, op_of


def main(name: str, provider: str, device: str) -> None:
    if provider == "ours JIT":
        # The same operators without kernel packs.
        os.environ["LIGER_OPS_PACK_DIR"], provider = os.devnull, "ours"
    op = op_of(name)
    if device not in op.host:
        sys.exit(f"{name} has no shape for host costs on {device}")
    spec = op.host[device]
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    tensors = op.inputs(Make(device, getattr(torch, spec.dtype)), *spec.shape)
    for key, tensor in tensors.items():
        tensor.requires_grad_(tensor.is_floating_point() and key not in op.constants)
    synchronize()
    start = time.perf_counter()
    outputs = load(op, provider)(*tensors.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # backward() of a scalar, as in training: with upstream gradients torch imports sympy.
    sum(o.sum() for o in outputs).backward()
    synchronize()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
