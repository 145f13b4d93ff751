"""Functions for single model types: `apply_liger_kernel_to_<name>(model, **switches)`.

They work as `apply_liger_kernel`, but refuse a model of another type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from .linears import Filter
from .options import UNCHANGED, Unchanged, checked_options
from .patch import Report, apply_liger_kernel, check_model, unwrapped

NAMES = (
    "cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 "
    "gemma4_text glm glm4 gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llava ministral mistral "
    "mixtral muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen3 qwen3_moe qwen3_next smollm3 "
    "smolvlm"
).split()
# Composite models have one type for the whole model and one for its text part.
COMPOSITE = ("glm4v glm4v_moe llama4 qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe").split()
# name: accepted model types.
MODELS: dict[str, tuple[str, ...]] = dict(
    sorted([
        *((name, (name,)) for name in NAMES),
        *((name, (name, f"{name}_text")) for name in COMPOSITE),
        ("mllama", ("mllama", "mllama_text_model")),
    ])
)  # fmt: skip


@functools.lru_cache(None)
def applier(function: str, name: str) -> Callable[..., Report]:
    types = MODELS[name]

    def apply(
        model: nn.Module,
        *,
        memory_budget: int | None | Unchanged = UNCHANGED,
        fp8: str | None | Unchanged = UNCHANGED,
        fp8_filter: Filter | None | Unchanged = UNCHANGED,
        **switches: bool,
    ) -> Report:
        check_model(function, "model", model)
        given = checked_options(
            function, {"memory_budget": memory_budget, "fp8": fp8, "fp8_filter": fp8_filter, **switches}
        )
        found = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
        if found not in types:
            raise ValueError(f"{function}: model must be of type {' or '.join(types)} (got {found})")
        return apply_liger_kernel(model, **given)

    apply.__name__ = apply.__qualname__ = function
    apply.__doc__ = f":func:`apply_liger_kernel` for models of type {' or '.join(types)}."
    return apply
