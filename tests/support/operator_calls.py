"""A call of every public and private operator with all of its tensor arguments."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from liger_ops.reference import _calls, operators
from tests.support import calls
from tests.support.calls import SINGLE, VOCABULARY, is_constant
from tests.support.host.solo_group import solo_group

ops = torch.ops.liger
ROWS, N = 4, 8
# By dimension letter. One head of k serves all of q.
SIZES = calls.SIZES | dict(B=2, S=ROWS, T=ROWS, N=ROWS, Hk=1, W=3)
# Of the operators that have them: everything is computed.
OPTIONS = dict(entropy=True, entropy_grad=True, statistics=True, label_smoothing=0.1, sizes=[1, 1, 1, 2])
WITHOUT_GRADIENTS = {name for name, operator in operators().items() if is_constant(operator)}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def adapters(*features: int) -> dict[str, Any]:
    ranks = range(2, 2 + len(features))
    return dict(a=[numbers(r, N) for r in ranks], b=[numbers(m, r) for m, r in zip(features, ranks)])


def single(t: Tensor) -> Tensor:
    """In single precision, without ignored rows, of which operators do not write all results."""
    return t.detach().clamp(min=0) if t.dtype == torch.int64 else t.detach().to(SINGLE.get(t.dtype, t.dtype))


def public_call(op: str) -> dict[str, Any]:
    """A call of a public operator with all of its tensor arguments."""
    operator = operators()[op]
    values = {name: value for name, value in OPTIONS.items() if name in operator.types}
    given = _calls.optional_tensors(operator, values)
    made = _calls.call(operator, given, values, SIZES.__getitem__, [ROWS])
    return tree_map_only(Tensor, single, made)


def public_calls() -> dict[str, dict[str, Any]]:
    return {name: public_call(name) for name, operator in operators().items() if not operator.alias_of}


def product_calls() -> dict[str, dict[str, Any]]:
    """A call of each private operator that only models and modules call."""
    low_rank_input = dict(x=numbers(ROWS, N), a=adapters(3, 5)["a"], scale=[0.5, 2.0])
    return {
        "_mm": dict(a=numbers(ROWS, N), b=numbers(N, 3)),
        "_projections_grad": dict(grads=[numbers(ROWS, n) for n in (3, 5)], weights=[numbers(n, N) for n in (3, 5)]),
        "_lora_projections": dict(
            x=numbers(ROWS, N), weights=[numbers(n, N) for n in (3, 5)], biases=[numbers(3), None], **adapters(3, 5),
            scale=[0.5, 2.0], of=[0, 1],
        ),
        "_low_rank_input": low_rank_input,
        "_low_rank_input_bwd": dict(low_rank_input, grad=numbers(ROWS, 5), wanted=9),
    }  # fmt: skip


def arguments_of(op: str) -> list[Any]:
    return torch._C._get_schema(f"liger::{op}", "").arguments


def takes_tensors(op: str) -> bool:
    return any("Tensor" in str(a.type) for a in arguments_of(op))


ALIASES = {name for name, operator in operators().items() if operator.alias_of}
OPERATORS = sorted(
    op
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("liger::") and takes_tensors(op := name[7:]) and op not in ALIASES
)
PUBLIC = [op for op in OPERATORS if not op.startswith("_")]


def reductions(op: str) -> list[dict[str, str]]:
    """Options of calls that reduce losses, and that do not."""
    return [{}, {"reduction": "none"}] if "none" in operators()[op].choices.get("reduction", ()) else [{}]


def is_differentiable(op: str, name: str, t: Any) -> bool:
    constants = operators()[op].constants if op in operators() else ()
    return isinstance(t, Tensor) and t.is_floating_point() and name not in constants


def run(op: str, arguments: dict[str, Any]) -> Any:
    solo_group()
    return getattr(ops, op)(**arguments)


def copied(op: str, arguments: dict[str, Any], device: str, grad: bool = False) -> dict[str, Any]:
    """Copies every tensor into its own storage."""

    def copy(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [copy(name, v) for v in value]
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().to(device).requires_grad_(grad and is_differentiable(op, name, value))

    return {name: copy(name, value) for name, value in arguments.items()}


def backward(out: Any) -> None:
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])


def differentiable(op: str, arguments: dict[str, Any], device: str) -> dict[str, Any]:
    given = copied(op, arguments, device, grad=True)
    # A leaf that requires a gradient cannot be overwritten.
    return given | {"logits": given["logits"] * 1} if op == "cross_entropy_" else given


class Recorder(TorchDispatchMode):
    """Records the call with the most tensors for each private operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "liger":
            op = function._schema.name.removeprefix("liger::")
            names = [a.name for a in function._schema.arguments]
            found = copied(op, dict(zip(names, args)) | (kwargs or {}), "cpu")
            if len(tensors(found)) > len(tensors(self.calls.get(op, {}))):
                self.calls[op] = found
        return function(*args, **(kwargs or {}))


def tensors(arguments: dict[str, Any]) -> list[tuple[str, int | None]]:
    """The position of each tensor: argument name, and index if the argument is a list."""
    places: list[tuple[str, int | None]] = [(name, None) for name, v in arguments.items() if isinstance(v, Tensor)]
    for name, value in arguments.items():
        places += [(name, i) for i, v in enumerate(value if isinstance(value, list) else []) if isinstance(v, Tensor)]
    return places


@cache
def samples() -> dict[str, dict[str, Any]]:
    """A call of each operator with all of its tensor arguments."""
    torch.manual_seed(0)
    solo_group()
    public, recorder = public_calls(), Recorder()
    with recorder:
        for op, arguments in public.items():
            for more in reductions(op):
                backward(run(op, differentiable(op, arguments | more, "cpu")))
        # With several ids and a frozen head, backward reads everything that it may.
        frozen = copied("", public["fused_linear_log_probs"], "cpu") | dict(
            target=torch.zeros(ROWS, 2, dtype=torch.long)
        )
        backward(run("fused_linear_log_probs", frozen | dict(input=frozen["input"].requires_grad_())))
    found = recorder.calls | public
    for op in ("_cross_entropy_fwd", "_fused_linear_cross_entropy_fwd", "_fused_linear_cross_entropy_bwd"):
        found[op] |= dict(totals=numbers(2))
    weight = numbers(VOCABULARY).abs()
    found["_cross_entropy_totals"] = dict(
        target=torch.tensor([0, 1]), weight=weight, classes=VOCABULARY, ignore_index=-100, dtype=torch.float32
    )
    found |= product_calls()
    # Backward is not in place under a dispatch mode. The in-place operators take the same arguments.
    for op in OPERATORS:
        if op not in found and op.endswith("_"):
            known = found[op[:-1]]
            found[op] = {a.name: known[a.name] for a in arguments_of(op)}
    assert set(found) == set(OPERATORS)
    return found
