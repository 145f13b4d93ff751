"""A call of every public and private operator with all of its tensor arguments."""

from functools import cache
from typing import Any

import torch
from declared import is_constant, plain_operators, shapes_of
from solo_group import solo_group
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops.reference import operators

ops = torch.ops.liger
ROWS, N, CLASSES = 4, 8, 6


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def adapters(*features: int) -> dict[str, Any]:
    ranks = range(2, 2 + len(features))
    return dict(a=[numbers(r, N) for r in ranks], b=[numbers(m, r) for m, r in zip(features, ranks)])


def low_rank(prefix: str = "", classes: int = CLASSES) -> dict[str, Any]:
    shapes = {"input": ROWS, "weight": classes}
    return {f"{prefix}low_rank_{name}": numbers(size, 3) for name, size in shapes.items()}


# Operators without gradients.
QUANTIZERS = {name for name, operator in operators().items() if is_constant(operator)}


def public_calls() -> dict[str, dict[str, Any]]:
    """A call of each public operator with all of its tensor arguments."""
    calls = {
        op: {name: numbers(*shape) for name, shape in shapes_of(operator, [ROWS], N).items()}
        for op, operator in plain_operators().items()
    }
    rows, column, target = numbers(ROWS, N), numbers(N), torch.tensor([0, 2, 1, 5])
    gate = dict(gate=rows, up=numbers(ROWS, N))
    loss = dict(logits=numbers(ROWS, CLASSES), target=target, weight=numbers(CLASSES).abs(), label_smoothing=0.1)
    rows_and_labels = dict(input=rows, target=numbers(ROWS, N), shift_labels=target)
    linear = dict(
        input=rows, weight=numbers(CLASSES, N), target=target, bias=numbers(CLASSES), ce_weight=numbers(CLASSES).abs(),
        token_weight=numbers(ROWS).abs(), **low_rank(),
    )  # fmt: skip
    log_probs = dict(
        input=rows, weight=numbers(CLASSES, N), target=target, bias=numbers(CLASSES), entropy=True, entropy_grad=True,
        **low_rank(),
    )  # fmt: skip
    heads = dict(q=numbers(1, 2, ROWS, N), k=numbers(1, 1, ROWS, N))
    experts = dict(
        x=rows, gate_up=numbers(2, 6, N), down=numbers(2, N, 3), gate_up_bias=numbers(2, 6), down_bias=numbers(2, N),
        gate_up_a=numbers(2, 2, N), gate_up_b=numbers(2, 6, 2), down_a=numbers(2, 1, 3), down_b=numbers(2, N, 1),
    )  # fmt: skip
    calls |= {
        "hyper_pre": dict(
            streams=numbers(ROWS, 2, N),
            fn=numbers(8, 2 * N),
            base=numbers(8),
            scale=numbers(3),
            norm_eps=1e-6,
            eps=1e-6,
        ),
        # Of two streams, which no kernel serves.
        "hyper_post": dict(y=rows, streams=numbers(ROWS, 2, N), post=numbers(ROWS, 2), comb=numbers(ROWS, 2, 2)),
        "causal_conv1d": dict(
            x=numbers(2, ROWS, N),
            weight=numbers(N, 3),
            bias=numbers(N),
            seq_idx=target.view(1, ROWS).repeat(2, 1),
            initial_state=numbers(2, 2, N),
        ),
        "causal_conv1d_split": dict(
            x=numbers(2, ROWS, 10),
            weight=numbers(6, 3),
            bias=numbers(6),
            sizes=[1, 1, 1, 2],
            groups=2,
            seq_idx=target.view(1, ROWS).repeat(2, 1),
            initial_state=numbers(2, 2, 6),
        ),
        "short_conv": dict(
            bcx=numbers(2, ROWS, 3 * N),
            weight=numbers(N, 3),
            bias=numbers(N),
            seq_idx=target.view(1, ROWS).repeat(2, 1),
        ),
        "rope": dict(**heads, cos=numbers(ROWS, N), sin=numbers(ROWS, N)),
        "rope_freqs_cis": dict(**heads, freqs_cis=torch.polar(torch.ones(ROWS, N // 2), numbers(ROWS, N // 2))),
        "qk_norm_rope": dict(**heads, q_weight=column, k_weight=numbers(N), cos=numbers(ROWS, N), sin=numbers(ROWS, N)),
        "embedding": dict(input=target, weight=numbers(CLASSES, N)),
        "lora_linear": dict(x=rows, weight=numbers(5, N), **adapters(5, 5), scale=[0.5, 2.0], bias=numbers(5)),
        "fp8_linear": dict(x=numbers(ROWS, 16), weight=numbers(32, 16), bias=numbers(32)),
        "fp8_projections": dict(
            x=numbers(ROWS, 16), weights=[numbers(32, 16), numbers(16, 16)], biases=[numbers(32), numbers(16)]
        ),
        "moe_experts": dict(**experts, index=target.view(ROWS, 1), weight=numbers(ROWS, 1)),
        "moe_experts_sorted": dict(**experts, tokens_per_expert=torch.tensor([1, 2])),
        "cross_entropy": loss,
        "cross_entropy_with_metrics": loss,
        "cross_entropy_": loss,
        **{op: rows_and_labels for op in ("kl_div", "jsd", "tvd")},
        "log_probs": dict(logits=numbers(ROWS, CLASSES), index=target, entropy=True),
        "moe_router": dict(
            logits=numbers(ROWS, CLASSES),
            top_k=2,
            bias=numbers(CLASSES),
            token_weight=numbers(ROWS).abs(),
            statistics=True,
        ),
        "fused_linear_cross_entropy": linear,
        "fused_linear_cross_entropy_with_metrics": linear,
        "fused_linear_cross_entropy_with_log_probs": linear,
        "fused_linear_log_probs": log_probs,
        "fused_linear_divergence": dict(
            s_input=rows,
            s_weight=numbers(CLASSES, N),
            t_input=numbers(ROWS, 3),
            t_weight=numbers(CLASSES + 2, 3),
            s_bias=numbers(CLASSES),
            t_bias=numbers(CLASSES + 2),
            vocab_map=torch.arange(CLASSES) + 1,
            mask=target > 0,
            token_weight=numbers(ROWS).abs(),
            **low_rank("s_"),
            **low_rank("t_", CLASSES + 2),
        ),
    }
    calls |= {op: dict(**gate, weight=numbers(5, N), bias=numbers(5)) for op in ("swiglu_linear", "geglu_linear")}
    return calls


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


def is_differentiable(op: str, name: str, t: Any) -> bool:
    constants = operators()[op].constants if op in operators() else ()
    return isinstance(t, Tensor) and t.is_floating_point() and name not in constants


def call(op: str, arguments: dict[str, Any]) -> Any:
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
            for more in ({}, {"reduction": "none"}) if "cross_entropy" in op else ({},):
                backward(call(op, differentiable(op, arguments | more, "cpu")))
        # With several ids and a frozen head, backward reads everything that it may.
        frozen = copied("", public["fused_linear_log_probs"], "cpu") | dict(
            target=torch.zeros(ROWS, 2, dtype=torch.long)
        )
        backward(call("fused_linear_log_probs", frozen | dict(input=frozen["input"].requires_grad_())))
    found = recorder.calls | public
    for op in ("_cross_entropy_fwd", "_fused_linear_cross_entropy_fwd", "_fused_linear_cross_entropy_bwd"):
        found[op] |= dict(totals=numbers(2))
    weight = numbers(CLASSES).abs()
    found["_cross_entropy_totals"] = dict(
        target=torch.tensor([0, 1]), weight=weight, classes=CLASSES, ignore_index=-100, dtype=torch.float32
    )
    found |= product_calls()
    # Backward is not in place under a dispatch mode. The in-place operators take the same arguments.
    for op in OPERATORS:
        if op not in found and op.endswith("_"):
            known = found[op[:-1]]
            found[op] = {a.name: known[a.name] for a in arguments_of(op)}
    assert set(found) == set(OPERATORS)
    return found
