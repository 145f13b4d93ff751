"""The operators inside Hugging Face models: `apply_liger_kernel(model)`.

Only AutoLigerKernelForCausalLM and register_experts need transformers. `register_experts` runs once it is imported.
"""

from __future__ import annotations

from typing import Any

from ..distributed._lazy import when_imported
from .experts import register_experts
from .models import MODELS, applier
from .options import SWITCHES
from .patch import Report, Row, apply_liger_kernel, unpatch

NAMES = {f"apply_liger_kernel_to_{name}": name for name in MODELS}

__all__ = [
    "AutoLigerKernelForCausalLM", "Report", "Row", "SWITCHES", "apply_liger_kernel", "register_experts", "unpatch", *NAMES
]  # fmt: skip

when_imported("transformers.integrations.moe", register_experts)


def __getattr__(name: str) -> Any:
    if name == "AutoLigerKernelForCausalLM":
        from .auto import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM
    if name in NAMES:
        return applier(name, NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
