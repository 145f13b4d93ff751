"""Freed memory is never read: FSDP frees the storage of a parameter, and the tensor keeps its sizes.

Every public and private operator names the freed argument; backward names the freed saved tensor.
"""

import re
from typing import Any

import pytest
import torch
from checks import LAYOUTS
from declared import is_constant, plain_operators
from operator_calls import (
    OPERATORS,
    PUBLIC,
    backward,
    call,
    copied,
    differentiable,
    samples,
    tensors,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from liger_ops.reference._calls import described_tensors

ops = torch.ops.liger
FREED = r"\(got a storage of 0 bytes; FSDP or another owner freed it before this call\)"


ADAPTERS_OF_EXPERTS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
# Arguments that forward saves -> their names in the backward operator.
SAVED = {
    # Plain operators with a gradient save all of their tensors, unless an entry below says otherwise.
    **{
        op: {} if is_constant(operator) else {name: name for name in described_tensors(operator)}
        for op, operator in plain_operators().items()
    },
    "fused_add_rms_norm": dict(weight="weight"),
    "causal_conv1d": {name: name for name in ("x", "weight", "bias", "seq_idx", "initial_state")},
    "causal_conv1d_split": {name: name for name in ("x", "weight", "bias", "seq_idx", "initial_state")},
    "short_conv": {name: name for name in ("bcx", "weight", "bias", "seq_idx")},
    "layer_norm": dict(x="x", weight="weight"),
    "sigmoid_gate": dict(x="x", gate="gate"),
    "hyper_pre": {name: name for name in ("streams", "fn", "base", "scale")},
    "rope": dict(cos="cos", sin="sin"),
    "rope_freqs_cis": dict(freqs_cis="cos"),
    "qk_norm_rope": {name: name for name in ("q", "k", "q_weight", "k_weight", "cos", "sin")},
    "embedding": dict(input="input"),
    "lora_linear": {name: name for name in ("x", "weight", "a", "b")},
    "fp8_linear": dict(weight="weight"),
    "fp8_projections": dict(weights="weight"),
    "moe_experts": {
        name: name for name in ("x", "gate_up", "down", "index", "weight", "down_bias", *ADAPTERS_OF_EXPERTS)
    },
    "moe_experts_sorted": {name: name for name in ("x", "gate_up", "down", "down_bias", *ADAPTERS_OF_EXPERTS)},
    "cross_entropy": dict(logits="logits", target="target", weight="weight"),
    "cross_entropy_with_metrics": dict(logits="logits", target="target", weight="weight"),
    "cross_entropy_": dict(logits="dlogits"),
    "log_probs": dict(logits="logits", index="index"),
    "moe_router": dict(logits="logits", token_weight="token_weight"),
    "kl_div": dict(target="target", shift_labels="shift_labels"),
    **{op: dict(input="input", target="target", shift_labels="shift_labels") for op in ("jsd", "tvd")},
    # Reduced losses compute their gradients in forward.
    "fused_linear_cross_entropy": {},
    "fused_linear_cross_entropy_with_metrics": {},
    "fused_linear_cross_entropy_with_log_probs": {},
    "fused_linear_log_probs": {
        name: name for name in ("input", "weight", "target", "bias", "low_rank_input", "low_rank_weight")
    },
    # The default, one number per token, computes the logits again.
    "fused_linear_divergence": {
        name: name
        for name in (
            "s_input",
            "s_weight",
            "t_input",
            "t_weight",
            "s_bias",
            "t_bias",
            "mask",
            "token_weight",
            "vocab_map",
            "s_low_rank_input",
            "s_low_rank_weight",
            "t_low_rank_input",
            "t_low_rank_weight",
        )
    },
    **{f"{op}_linear": dict(gate="gate", up="up", weight="weight") for op in ("swiglu", "geglu")},
}


def tensor_at(arguments: dict[str, Any], place: tuple[str, int | None]) -> Tensor:
    name, i = place
    return arguments[name] if i is None else arguments[name][i]


def named(op: str, place: tuple[str, int | None]) -> str:
    """Regex for the start of a message: operator and argument."""
    shown = re.sub(r"^_(.*)_fwd$", r"\1", re.sub(r"^_(.*)_bwd_?$", r"\1 backward", op))
    # With an autograd graph, all variants of a loss call the same private operator.
    shown = re.sub("^(fused_linear_cross_entropy|cross_entropy)(_with_.*)$", r"\1(\2)?", shown)
    return shown + ": " + re.escape(place[0] + (f"[{place[1]}]" if place[1] is not None else ""))


@pytest.mark.parametrize("op", OPERATORS)
def test_every_tensor_of_every_operator(op, device):
    arguments = samples()[op]
    call(op, copied(op, arguments, device))
    assert tensors(arguments)
    for place in tensors(arguments):
        given = copied(op, arguments, device)
        t = tensor_at(given, place)
        bytes_needed = t.untyped_storage().nbytes()
        what = f"^{named(op, place)} must have memory for its {t.numel()} elements "
        half = bytes_needed // 2
        t.untyped_storage().resize_(half)
        with pytest.raises(RuntimeError, match=rf"{what}\(got a storage of {half} bytes, {bytes_needed} are needed\)"):
            call(op, given)
        t.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=what + FREED):
            call(op, given)


@pytest.mark.parametrize(
    "autocast,dtype", [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("op", PUBLIC)
def test_every_tensor_with_a_graph_and_under_autocast(op, autocast, dtype, device):
    """dtype: the freed tensor's dtype, which autocast may have to convert."""
    arguments = samples()[op]
    for place in tensors(arguments):
        freed = tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, arguments[place[0]])
        given = differentiable(op, arguments | {place[0]: freed}, device)
        t = tensor_at(given, place)
        t.untyped_storage().resize_(0)
        what = f"^{named(op, place)} must have memory for its {t.numel()} elements {FREED}"
        with torch.autocast(device, torch.bfloat16, enabled=autocast), pytest.raises(RuntimeError, match=what):
            call(op, given)


@pytest.mark.parametrize(
    "op,more",
    [(op, {}) for op in PUBLIC] + [(op, {"reduction": "none"}) for op in PUBLIC if "cross_entropy" in op],
    ids=str,
)
def test_tensors_saved_by_forward(op, more, device):
    """FSDP frees parameters between forward and backward. Tensors that were not saved may be freed."""
    saved = SAVED[op]
    if op.startswith("fused_linear") and more:
        saved = {name: name for name, _ in tensors(samples()[op])}
    for place in tensors(samples()[op]):
        given = differentiable(op, samples()[op] | more, device)
        out = call(op, given)
        tensor_at(given, place).untyped_storage().resize_(0)
        if place[0] in saved:
            what = rf"^\w+( backward)?: {saved[place[0]]}(\[\d\])? must have memory for its \d+ elements {FREED}"
            with pytest.raises(RuntimeError, match=what):
                backward(out)
        else:
            backward(out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_must_reach_the_last_element_only(layout, device):
    x = LAYOUTS[layout](torch.randn(2, 3, 4, 8, device=device))
    expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    needed = (last + 1) * x.element_size()
    x.untyped_storage().resize_(needed)
    torch.testing.assert_close(ops.rms_norm(x), expected)
    x.untyped_storage().resize_(needed - 1)
    with pytest.raises(RuntimeError, match=rf"\(got a storage of {needed - 1} bytes, {needed} are needed\)"):
        ops.rms_norm(x)


def test_empty_tensors_need_no_memory(device):
    x = torch.randn(4, 8, device=device)
    empty = x[:0]
    x.untyped_storage().resize_(0)
    assert ops.rms_norm(empty).shape == (0, 8)


@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_without_memory_are_accepted(op):
    """For example on the meta device."""
    call(op, copied(op, samples()[op], "meta"))


@pytest.mark.parametrize("op", [op for op in PUBLIC if op != "cross_entropy_"])
def test_wrapper_tensors_are_accepted(op):
    """Autocast receives fake and functional tensors before they are unwrapped."""
    arguments = samples()[op]
    with torch.autocast("cpu", torch.bfloat16):
        with FakeTensorMode() as fake:
            call(op, tree_map_only(Tensor, fake.from_tensor, arguments))
        given = {name: v for name, v in arguments.items() if any(isinstance(t, Tensor) for t in tree_leaves(v))}
        constants = {name: v for name, v in arguments.items() if name not in given}
        torch.func.functionalize(lambda given: call(op, given | constants))(given)
