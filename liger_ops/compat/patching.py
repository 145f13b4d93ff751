"""The package's functions that patch a model, or all models of a type that are constructed later."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from ..transformers import SWITCHES, apply_liger_kernel
from ..transformers.models import MODELS
from ..transformers.options import OPTIONS, checked_options

# Model type: the options of apply_liger_kernel for models that are constructed later.
_options_by_type: dict[str, dict[str, Any]] = {}
_original_post_init: Any = None


def patch_future_models(types: tuple[str, ...], options: dict[str, Any]) -> None:
    """Patches models of these types on construction. The package instead patches the module in transformers."""
    global _original_post_init
    from transformers import PreTrainedModel

    _options_by_type.update(dict.fromkeys(types, options))
    if _original_post_init is not None:
        return
    original = _original_post_init = PreTrainedModel.post_init

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        chosen = _options_by_type.get(getattr(self.config, "model_type", ""))
        if chosen is None:
            return
        with warnings.catch_warnings():
            # The inner base model is patched first. It has no loss, so its warning would say nothing about the whole
            # model, which is patched next.
            if "labels" not in inspect.signature(type(self).forward).parameters:
                warnings.filterwarnings("ignore", "liger_ops: .* is left as it is", RuntimeWarning)
            apply_liger_kernel(self, **chosen)

    PreTrainedModel.post_init = post_init


def stop_patching() -> None:
    global _original_post_init
    _options_by_type.clear()
    if _original_post_init is not None:
        from transformers import PreTrainedModel

        PreTrainedModel.post_init = _original_post_init
        _original_post_init = None


# The parameters of the package's functions, in order. A minus sign means that the default is False.
USUAL = "rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
NO_ROPE = "-rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
NO_SWIGLU = "rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu model"
WITH_LAYER_NORM = "rope -cross_entropy fused_linear_cross_entropy layer_norm rms_norm swiglu model"
WITH_GEGLU = "rope -cross_entropy fused_linear_cross_entropy rms_norm geglu model"
WITH_BOTH = "rope -cross_entropy fused_linear_cross_entropy layer_norm rms_norm geglu model"
COMPOSITE = "-cross_entropy fused_linear_cross_entropy rms_norm layer_norm model **kwargs"
PARAMETERS: dict[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4", "glm4v", "glm4v_moe"), NO_ROPE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), NO_ROPE),
    "deepseek_v4": "-rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu model",
    "gemma": WITH_GEGLU,
    "gemma2": WITH_GEGLU,
    "gemma3": WITH_BOTH,
    "gemma3_text": WITH_GEGLU,
    "gemma4": "-rope -cross_entropy fused_linear_cross_entropy -layer_norm rms_norm geglu model",
    "gemma4_text": "-rope -cross_entropy fused_linear_cross_entropy rms_norm geglu model",
    "gpt_oss": NO_SWIGLU,
    "granite": "rope cross_entropy -fused_linear_cross_entropy rms_norm swiglu model",
    "internvl": COMPOSITE,
    "llama4": f"{USUAL} layer_norm",
    "llava": "-cross_entropy fused_linear_cross_entropy model **kwargs",
    "mllama": WITH_LAYER_NORM,
    "muse_glimmer": WITH_LAYER_NORM,
    "nemotron": "relu_squared -cross_entropy fused_linear_cross_entropy model **kwargs",
    "paligemma": WITH_BOTH,
    "pixtral": "rope rms_norm swiglu model",
    "qwen2_vl": "rope -cross_entropy fused_linear_cross_entropy rms_norm layer_norm swiglu model",
    "qwen3_vl": NO_SWIGLU,
    "smolvlm": COMPOSITE,
}


def parameter(word: str) -> inspect.Parameter:
    if word.startswith("**"):
        return inspect.Parameter(word[2:], inspect.Parameter.VAR_KEYWORD)
    default = None if word == "model" else not word.startswith("-")
    return inspect.Parameter(word.removeprefix("-"), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def signature_of(words: list[str]) -> inspect.Signature:
    """The package's parameters, then the remaining parameters of apply_liger_kernel as keyword-only."""
    theirs = [parameter(word) for word in words]
    rest = {name: name != "cross_entropy" for name in SWITCHES} | {"memory_budget": None}
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in rest.items()
        if name not in {p.name for p in theirs}
    ]
    return inspect.Signature(sorted(theirs + ours, key=lambda p: p.kind))


def applier(name: str, types: tuple[str, ...], words: str) -> Callable[..., None]:
    signature = signature_of(words.split())

    def apply(*args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        given = bound.arguments | bound.arguments.get("kwargs", {})
        if given["cross_entropy"] and given["fused_linear_cross_entropy"]:
            raise AssertionError("cross_entropy and fused_linear_cross_entropy cannot both be True.")
        options = {key: given[key] for key in (*SWITCHES, "memory_budget")}
        checked_options(name, options)
        if given["model"] is None:
            patch_future_models(types, options)
        else:
            apply_liger_kernel(given["model"], **options)

    apply.__name__ = apply.__qualname__ = name
    vars(apply)["__signature__"] = signature
    return apply


APPLIERS: dict[str, Callable[..., None]] = {
    f"apply_liger_kernel_to_{name}": applier(f"apply_liger_kernel_to_{name}", types, PARAMETERS.get(name, USUAL))
    for name, types in MODELS.items()
}
MODEL_TYPE_TO_APPLY_LIGER_FN = {
    model_type: APPLIERS[f"apply_liger_kernel_to_{name}"] for name, types in MODELS.items() for model_type in types
}


# Options of the package that liger_ops has no switch for.
OTHERS = sorted({word.lstrip("-") for words in PARAMETERS.values() for word in words.split() if word[0] != "*"}
                - {*SWITCHES, "model"})  # fmt: skip


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    if model_type:
        patch_future_models((model_type,), checked_config(kwargs))


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    apply_liger_kernel(model, **checked_config(kwargs))


def checked_config(config: dict[str, Any]) -> dict[str, Any]:
    """The options of apply_liger_kernel in Trainer's liger_kernel_config."""
    name, keys = "liger_kernel_config", (*OPTIONS, *OTHERS)
    if unknown := sorted(config.keys() - set(keys)):
        raise TypeError(f"{name}: keys must be of {', '.join(keys)} (got {', '.join(unknown)})")
    for key in OTHERS:
        if not isinstance(config.get(key, True), bool):
            raise TypeError(f"{name}: {key} must be True or False (got {config[key]!r})")
    return checked_options(name, {key: value for key, value in config.items() if key not in OTHERS})
