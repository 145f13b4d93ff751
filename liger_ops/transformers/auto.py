"""Models that are patched on construction."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .options import OPTIONS, SWITCHES, checked_options
from .patch import apply_liger_kernel

NAME = "AutoLigerKernelForCausalLM"


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """:class:`transformers.AutoModelForCausalLM` that patches its models. Accepts the options of
    :func:`apply_liger_kernel` as keywords."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> PreTrainedModel:
        load = super().from_pretrained
        return patched(lambda rest: load(pretrained_model_name_or_path, *model_args, **rest), kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> PreTrainedModel:
        load = super().from_config
        return patched(lambda rest: load(config, **rest), kwargs)


def patched(load: Callable[[dict[str, Any]], Any], kwargs: dict[str, Any]) -> Any:
    """load: loads the model with the keywords that are none of apply_liger_kernel."""
    # Checked before the model is loaded.
    given = checked_options(NAME, {name: kwargs.pop(name) for name in OPTIONS if name in kwargs})
    try:
        model = load(kwargs)
    except TypeError as error:
        # transformers passes keywords that it does not know to the model.
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        rule = f"switches must be of {', '.join(SWITCHES)}, and other keywords what transformers or the model takes"
        raise TypeError(f"{NAME}: {rule} (got {unknown[1]})") from error
    # With output_loading_info=True the model comes in a tuple.
    apply_liger_kernel(model[0] if isinstance(model, tuple) else model, **given)
    return model
