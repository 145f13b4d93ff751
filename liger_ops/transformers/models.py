"""Functions for single model types: `apply_liger_kernel_to_<name>(model, **switches)`.

They work as `apply_liger_kernel`, but refuse a model of another type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from .patch import apply_liger_kernel, check_model, checked_options, unwrapped
from .report import Report

# name: accepted model types. Composite models have one type for the whole model and one for its text part.
MODELS: dict[str, tuple[str, ...]] = {
    "cohere": ("cohere",),
    "cohere2": ("cohere2",),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "deepseek_v4": ("deepseek_v4",),
    "exaone4": ("exaone4",),
    "falcon_h1": ("falcon_h1",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3",),
    "gemma3_text": ("gemma3_text",),
    "gemma4": ("gemma4",),
    "gemma4_text": ("gemma4_text",),
    "glm": ("glm",),
    "glm4": ("glm4",),
    "glm4v": ("glm4v", "glm4v_text"),
    "glm4v_moe": ("glm4v_moe", "glm4v_moe_text"),
    "gpt_oss": ("gpt_oss",),
    "granite": ("granite",),
    "hunyuan_v1_dense": ("hunyuan_v1_dense",),
    "hunyuan_v1_moe": ("hunyuan_v1_moe",),
    "internvl": ("internvl",),
    "llama": ("llama",),
    "llama4": ("llama4", "llama4_text"),
    "llava": ("llava",),
    "ministral": ("ministral",),
    "mistral": ("mistral",),
    "mixtral": ("mixtral",),
    "mllama": ("mllama", "mllama_text_model"),
    "muse_glimmer": ("muse_glimmer",),
    "nemotron": ("nemotron",),
    "olmo2": ("olmo2",),
    "olmo3": ("olmo3",),
    "paligemma": ("paligemma",),
    "phi3": ("phi3",),
    "pixtral": ("pixtral",),
    "qwen2": ("qwen2",),
    "qwen2_vl": ("qwen2_vl", "qwen2_vl_text"),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl_text"),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_5": ("qwen3_5", "qwen3_5_text"),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_text"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    "smollm3": ("smollm3",),
    "smolvlm": ("smolvlm",),
}


@functools.lru_cache(None)
def applier(function: str, name: str) -> Callable[..., Report]:
    types = MODELS[name]

    def apply(model: nn.Module, *, memory_budget: int | None = None, **switches: bool) -> Report:
        check_model(function, "model", model)
        checked_options(function, memory_budget, switches)
        found = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
        if found not in types:
            raise ValueError(f"{function}: model must be of type {' or '.join(types)} (got {found})")
        return apply_liger_kernel(model, memory_budget=memory_budget, **switches)

    apply.__name__ = apply.__qualname__ = function
    apply.__doc__ = f":func:`apply_liger_kernel` for models of type {' or '.join(types)}."
    return apply
