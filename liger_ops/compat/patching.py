"""The package's functions that patch models, those that are there and those that are yet to be made."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, Callable

from torch import nn

from ..transformers import SWITCHES, apply_liger_kernel
from ..transformers.models import MODELS

# What apply_liger_kernel is told of the model types whose instances are patched as they are made.
_pending: dict[str, dict[str, Any]] = {}
_post_init: Any = None


def for_models_to_come(types: tuple[str, ...], options: dict[str, Any]) -> None:
    """Without a model, the package patches transformers itself; here, models of these types when they are made."""
    global _post_init
    from transformers import PreTrainedModel

    _pending.update(dict.fromkeys(types, options))
    if _post_init is not None:
        return
    original = _post_init = PreTrainedModel.post_init

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        chosen = _pending.get(getattr(self.config, "model_type", None))
        if chosen is None:
            return
        with warnings.catch_warnings():
            # The base model inside a model comes first, and has no loss; its own modules are found patched by the
            # second, which knows better whether anything was left.
            if "labels" not in inspect.signature(type(self).forward).parameters:
                warnings.filterwarnings("ignore", "liger_ops: .* is left as it is", RuntimeWarning)
            apply_liger_kernel(self, **chosen)

    PreTrainedModel.post_init = post_init


def forget() -> None:
    global _post_init
    _pending.clear()
    if _post_init is not None:
        from transformers import PreTrainedModel

        PreTrainedModel.post_init = _post_init
        _post_init = None


def applier(name: str, types: tuple[str, ...]) -> Callable[..., None]:
    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: nn.Module | None = None,
        layer_norm: bool = True,
        geglu: bool = True,
        relu_squared: bool = True,
        *,
        embedding: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        """The package's arguments, of which relu_squared has no operator here, and two of apply_liger_kernel's own."""
        if cross_entropy and fused_linear_cross_entropy:
            raise AssertionError("cross_entropy and fused_linear_cross_entropy cannot both be True.")
        options = dict(
            rope=rope, cross_entropy=cross_entropy, fused_linear_cross_entropy=fused_linear_cross_entropy,
            rms_norm=rms_norm, swiglu=swiglu, layer_norm=layer_norm, geglu=geglu, embedding=embedding,
            memory_budget=memory_budget,
        )  # fmt: skip
        if model is None:
            for_models_to_come(types, options)
        else:
            apply_liger_kernel(model, **options)

    apply.__name__ = apply.__qualname__ = name
    return apply


APPLIERS: dict[str, Callable[..., None]] = {
    f"apply_liger_kernel_to_{name}": applier(f"apply_liger_kernel_to_{name}", types) for name, types in MODELS.items()
}
MODEL_TYPE_TO_APPLY_LIGER_FN = {
    model_type: APPLIERS[f"apply_liger_kernel_to_{name}"] for name, types in MODELS.items() for model_type in types
}


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    if model_type:
        for_models_to_come((model_type,), applicable(kwargs))


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    apply_liger_kernel(model, **applicable(kwargs))


def applicable(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in SWITCHES if name in kwargs}
