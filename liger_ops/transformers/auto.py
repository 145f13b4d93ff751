"""Models that are patched on construction."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .patch import SWITCHES, apply_liger_kernel


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """:class:`transformers.AutoModelForCausalLM` that patches its models. Accepts the switches as keywords."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
        switches = pop_switches(kwargs)
        return patched(super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), switches)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> PreTrainedModel:
        switches = pop_switches(kwargs)
        return patched(super().from_config(config, **kwargs), switches)


def pop_switches(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs.pop(name) for name in (*SWITCHES, "memory_budget") if name in kwargs}


def patched(model: Any, switches: dict[str, Any]) -> Any:
    # With output_loading_info=True the model comes in a tuple.
    apply_liger_kernel(model[0] if isinstance(model, tuple) else model, **switches)
    return model
