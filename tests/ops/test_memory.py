"""Freed memory is never read: FSDP frees the storage of a parameter, and the tensor keeps its sizes.

Every public and private operator names the freed argument; backward names the freed saved tensor.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.checks import LAYOUTS, equal
from tests.support.operator_calls import (
    OPERATORS,
    PUBLIC,
    WITHOUT_GRADIENTS,
    backward,
    copied,
    differentiable,
    reductions,
    run,
    samples,
    tensors,
)

ops = torch.ops.liger
FREED = r"\(got a storage of 0 bytes; FSDP or another owner freed it before this call\)"


# Arguments that have other names in backward.
NAME_IN_BACKWARD = {"freqs_cis": "cos", "logits": "d?logits", "weights": "weight"}


def tensor_at(arguments: dict[str, Any], place: tuple[str, int | None]) -> Tensor:
    name, i = place
    return arguments[name] if i is None else arguments[name][i]


def named(op: str, place: tuple[str, int | None]) -> str:
    """Regex for the start of a message: operator and argument."""
    shown = re.sub(r"^_(.*)_fwd$", r"\1", re.sub(r"^_(.*)_bwd_?$", r"\1 backward", op))
    # With an autograd graph, all variants of a loss call the same private operator.
    shown = re.sub("^(fused_linear_cross_entropy|fused_linear_log_probs|cross_entropy)(_with_.*)$", r"\1(\2)?", shown)
    return shown + ": " + re.escape(place[0] + (f"[{place[1]}]" if place[1] is not None else ""))


@pytest.mark.parametrize("op", OPERATORS)
def test_every_tensor_of_every_operator(op, device):
    arguments = samples()[op]
    run(op, copied(op, arguments, device))
    assert tensors(arguments)
    for place in tensors(arguments):
        given = copied(op, arguments, device)
        t = tensor_at(given, place)
        bytes_needed = t.untyped_storage().nbytes()
        what = f"^{named(op, place)} must have memory for its {t.numel()} elements "
        half = bytes_needed // 2
        t.untyped_storage().resize_(half)
        with pytest.raises(RuntimeError, match=rf"{what}\(got a storage of {half} bytes, {bytes_needed} are needed\)"):
            run(op, given)
        t.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=what + FREED):
            run(op, given)


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
            run(op, given)


def saved_by(op: str, arguments: dict[str, Any]) -> tuple[Any, list[tuple[str, int | None]]]:
    """The results of a call, and the tensors that it saves for backward."""
    storages = set()

    def pack(t: Tensor) -> Tensor:
        storages.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run(op, arguments)
    return out, [p for p in tensors(arguments) if tensor_at(arguments, p).untyped_storage().data_ptr() in storages]


def change(name: str, t: Tensor) -> None:
    if name == "shift_labels":
        t.fill_(-100)
    elif t.is_floating_point() or t.is_complex():
        t.fill_(torch.nan)
    else:
        t.view(-1)[0] = t.view(-1)[0] == 0


DIFFERENTIABLE = [op for op in PUBLIC if op not in WITHOUT_GRADIENTS]


@pytest.mark.parametrize("op,more", [(op, more) for op in DIFFERENTIABLE for more in reductions(op)], ids=str)
def test_tensors_saved_by_forward(op, more, device):
    """FSDP frees parameters between forward and backward. Tensors that were not saved may be freed."""
    for place in tensors(samples()[op]):
        given = differentiable(op, samples()[op] | more, device)
        out, saved = saved_by(op, given)
        tensor_at(given, place).untyped_storage().resize_(0)
        if place in saved:
            name = NAME_IN_BACKWARD.get(place[0], place[0])
            what = rf"^\w+( backward)?: {name}(\[\d\])? must have memory for its \d+ elements {FREED}"
            with pytest.raises(RuntimeError, match=what):
                backward(out)
        else:
            backward(out)


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if not op.endswith("_")])
def test_backward_reads_what_forward_saved(op, device):
    """A tensor that is kept for nothing costs memory."""

    def gradients(place):
        given = differentiable(op, samples()[op], device)
        out, saved = saved_by(op, given)
        if place is not None:
            change(place[0], tensor_at(given, place).data)
        backward(out)
        return [t.grad for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad], saved

    expected, saved = gradients(None)
    unread = [place[0] for place in saved if equal(gradients(place)[0], expected)]
    assert unread == (["index"] if op == "moe_experts" and device == "cpu" else [])  # the GPU reads it


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
    run(op, copied(op, samples()[op], "meta"))


@pytest.mark.parametrize("op", [op for op in PUBLIC if op != "cross_entropy_"])
def test_wrapper_tensors_are_accepted(op):
    """Autocast receives fake and functional tensors before they are unwrapped."""
    arguments = samples()[op]
    with torch.autocast("cpu", torch.bfloat16):
        with FakeTensorMode() as fake:
            run(op, tree_map_only(Tensor, fake.from_tensor, arguments))
        given = {name: v for name, v in arguments.items() if any(isinstance(t, Tensor) for t in tree_leaves(v))}
        constants = {name: v for name, v in arguments.items() if name not in given}
        torch.func.functionalize(lambda given: run(op, given | constants))(given)
