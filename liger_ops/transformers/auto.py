"""Models that are patched on construction."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .patch import SWITCHES, apply_liger_kernel, checked_options
from .patched import Options


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """:class:`transformers.AutoModelForCausalLM` that patches its models. Accepts the options of
    :func:`apply_liger_kernel` as keywords."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
        options = pop_options(kwargs)
        return patched(super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), options)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> PreTrainedModel:
        options = pop_options(kwargs)
        return patched(super().from_config(config, **kwargs), options)


def pop_options(kwargs: dict[str, Any]) -> Options:
    """Checked before the model is loaded."""
    given = {name: kwargs.pop(name) for name in SWITCHES if name in kwargs}
    memory_budget, fp8, fp8_filter = (kwargs.pop(name, None) for name in ("memory_budget", "fp8", "fp8_filter"))
    return checked_options("AutoLigerKernelForCausalLM", memory_budget, given, fp8, fp8_filter)


def patched(model: Any, options: Options) -> Any:
    # With output_loading_info=True the model comes in a tuple.
    whole = model[0] if isinstance(model, tuple) else model
    apply_liger_kernel(
        whole, memory_budget=options.memory_budget, fp8=options.fp8, fp8_filter=options.fp8_filter, **options.switches
    )
    return model
