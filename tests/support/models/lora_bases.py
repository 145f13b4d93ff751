"""Bases of LoRA layers whose own forward computes the projection. Stand-ins replace those of absent packages."""

import importlib.util
import sys
import types
from collections.abc import Callable
from unittest import mock

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import aqlm, awq, gptq, te
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D


class Codes(nn.Module):
    """A weight as eight-bit codes with scales, as quantised layers have. computes, returns: dtypes, or those of the input."""

    def __init__(
        self, linear: nn.Linear, computes: torch.dtype | None = None, returns: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.computes, self.returns = computes, returns
        weight = linear.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        computes = self.computes or x.dtype
        bias = None if self.bias is None else self.bias.to(computes)
        y = functional.linear(x.to(computes), self.qweight.to(computes) * self.scales.to(computes), bias)
        return y.to(self.returns or x.dtype)


def of_absent_package(name: str, cls: str, package: dict[str, str]) -> type[nn.Module]:
    """A LoRA layer that peft defines only if a package is installed. package: classes that it imports, by module."""
    modules = {module: types.ModuleType(module) for module in package}
    for module, imported in package.items():
        setattr(modules[module], imported, type(imported, (nn.Module,), {}))
    spec = importlib.util.find_spec(f"peft.tuners.lora.{name}")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules), mock.patch(f"peft.import_utils.is_{name}_available", lambda: True):
        spec.loader.exec_module(found)
    return getattr(found, cls)


HQQ = {"hqq": "HQQLinear", "hqq.core": "HQQLinear", "hqq.core.quantize": "HQQLinear"}
# LoRA layers of peft over Codes, by the package that has such bases.
OVER_CODES: dict[str, type[nn.Module]] = {
    "gptq": gptq.GPTQLoraLinear,
    "awq": awq.AwqLoraLinear,
    "aqlm": aqlm.AqlmLoraLinear,
    "te": te.TeLinear,
    "eetq": of_absent_package("eetq", "EetqLoraLinear", {"eetq": "EetqLinear"}),
    "hqq": of_absent_package("hqq", "HqqLoraLinear", HQQ),
    "linear": LoraLinear,
}


def int8(linear: nn.Linear) -> nn.Module:
    made = bitsandbytes.nn.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False
    )
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def conv1d(linear: nn.Linear) -> nn.Module:
    made = Conv1D(linear.out_features, linear.in_features)
    made.load_state_dict({"weight": linear.weight.t(), "bias": linear.bias})
    return made.to(linear.weight.dtype)


class OtherLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def other_class(linear: nn.Linear) -> nn.Module:
    linear.__class__ = OtherLinear
    return linear


def hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    linear.register_forward_hook(lambda module, given, result: result * 2)
    return linear


def other_forward(linear: nn.Linear) -> nn.Module:
    linear.forward = lambda x: functional.linear(x, linear.weight).tanh()
    return linear


def parametrized(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", nn.Tanh())


class Marked(Tensor):
    """Results are of this class too."""


def marked(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Marked), requires_grad=False)
    return linear


def four_bits(linear: nn.Linear) -> nn.Module:
    """That computes in another dtype than its input."""
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, torch.float32, quant_type="nf4"
    )
    made.load_state_dict(linear.state_dict())
    made.support_avx512bf16_for_cpu = False
    return made.to("cpu")


# How a base is made, and why it is called.
BASES: dict[str, tuple[Callable[[nn.Linear], nn.Module], str]] = {
    **dict.fromkeys(OVER_CODES, (Codes, "base is Codes")),
    "int8": (int8, "base is Linear8bitLt"),
    "conv1d": (conv1d, "base is Conv1D"),
    "class": (other_class, "base is OtherLinear"),
    "hooked": (hooked, "base is hooked or wrapped"),
    "forward": (other_forward, "base is hooked or wrapped"),
    "parametrized": (parametrized, "base is ParametrizedLinear"),
    "marked": (marked, "the weight of base is Marked"),
    "nf4": (four_bits, "base computes in torch.float32, its input is torch.bfloat16"),
}


def replace_linears(model: nn.Module, replaced: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """All but the head, as in models that are loaded with quantised weights."""
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear) and name != "lm_head":
                parent._modules[name] = replaced(child)
    return model


def with_bases(model: nn.Module, kind: str) -> nn.Module:
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind == "nf4"
    return replace_linears(model, BASES[kind][0])


def adapt(model: nn.Module, kind: str, targets: list[str], dtype: torch.dtype | None = None, **options) -> nn.Module:
    """dtype: of the adapters, or fp32."""
    torch.manual_seed(1)
    # B is zero at the start of a training: no gradient would reach A.
    given = {"r": 4, "lora_alpha": 6, "target_modules": targets, "init_lora_weights": False, **options}
    config = LoraConfig(**given, fan_in_fan_out=kind == "conv1d")
    if kind in OVER_CODES:
        config._register_custom_module({Codes: OVER_CODES[kind]})
    return get_peft_model(model, config, autocast_adapter_dtype=dtype in (None, torch.float32))
