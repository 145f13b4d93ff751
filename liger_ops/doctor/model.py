"""What apply_liger_kernel would do with a model. Its weights are neither downloaded nor allocated."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..transformers import Report, apply_liger_kernel


class CannotExamine(Exception):
    """The arguments are what is wrong, and the next step."""


# Of a model on the hub.
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
PLACES = "pass a folder with a config.json, the file itself, or the name of a model on the Hugging Face Hub"


def build(name: str) -> nn.Module:
    """The model of a folder, of a config.json or of a name that transformers knows, on the meta device."""
    try:
        import transformers
    except ImportError:
        raise CannotExamine(
            "transformers is not installed", 'pip install "transformers>=5.10,<6", then run this command again'
        ) from None
    # transformers would ask the hub for a model of this name.
    if (name.endswith(".json") or not NAME.fullmatch(name)) and not Path(name).exists():
        raise CannotExamine(f"{name} does not exist", PLACES)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CannotExamine(f"{name} has no config that transformers can read: {reason}", PLACES) from None
    # Models that also see images are no causal language models for transformers.
    named = (getattr(transformers, each, None) for each in config.architectures or [])
    cls: Any = next(filter(None, named), None)
    try:
        with torch.device("meta"):
            return cls._from_config(config) if cls else transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise CannotExamine(
            f"transformers cannot build {name}: {type(error).__name__}: {error}",
            "build the model yourself, and print(apply_liger_kernel(model))",
        ) from error


def examine(name: str) -> tuple[Report, list[str]]:
    """The report, and the warnings."""
    model = build(name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = apply_liger_kernel(model)
    return report, [str(each.message) for each in said if str(each.message).startswith("liger_ops: ")]
