"""Schemas and dispatch keys of all operators, compared with registration.txt.

A difference is a change that users see. Update the file after an intended change:
.venv/bin/python tests/ops/test_registration.py
"""

from pathlib import Path

import torch

import liger_ops

RECORD = Path(__file__).with_name("registration.txt")
KEYS = ("CPU", "CUDA", "Meta", "Autograd", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA")
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def implementations(name: str) -> list[str]:
    op = f"liger::{name}"
    composite = [key for key in COMPOSITE if has(op, key)]
    found = composite or [key for key in KEYS if has(op, key)]
    return found + (["vmap"] if has(op, "FuncTorchBatched") else [])


def record() -> str:
    names = sorted(n.removeprefix("liger::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("liger::"))
    lines = []
    for name in names:
        lines.append(str(getattr(torch.ops.liger, name).default._schema).removeprefix("liger::"))
        lines.append("    " + (", ".join(implementations(name)) or "-"))
    return "\n".join(lines) + "\n"


def test_schemas_and_implementations_match_the_record():
    assert liger_ops._loaded.library is not None
    assert record() == RECORD.read_text()


if __name__ == "__main__":
    RECORD.write_text(record())
