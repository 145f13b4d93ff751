"""How tests call each operator that has a gradient: ROWS. Every operator has rows by its declaration, with all tensors and
without the optional ones; those below have other options and shapes.

B (batch) and S (sequence) vary between calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_ops.reference import Operator, operators
from liger_ops.reference._calls import (
    Shapes,
    described_tensors,
    optional_tensors,
    random_tensor,
    required_options,
    shapes_of,
)
from tests.support.host.solo_group import SOLO, solo_group

WIDTH, VOCABULARY, SIZE = 16, 24, 8
# By dimension letter. The doctor's are too large for tests of every row.
SIZES = dict(
    B="B", S="S", T="B", N="B", Hq=2, Hk=2, D=SIZE, R=SIZE, n=WIDTH, m=20, V=VOCABULARY, K=2, r=3, q=2, E=3, I=SIZE, H=WIDTH,
    C=WIDTH, W=4, d=4,
)  # fmt: skip
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# Weights of experts, so that rounding errors of two GEMMs stay near one. Logits are larger, so that softcaps change them.
SCALED = ("(E, ",)


class Dtypes:
    """Of tensors, as the documentation says: that of the call, that of another argument, or fp32 for arguments of which it says
    so."""

    def __init__(self, operator: Operator, dtype: torch.dtype, is_wide: Callable[[], bool]) -> None:
        """is_wide: asked once for arguments that are described together, which have one dtype."""
        self.described, self.dtype, self.is_wide = described_tensors(operator.base or operator), dtype, is_wide
        self.wide: dict[int, bool] = {}

    def of(self, name: str) -> torch.dtype:
        note = self.described[name].note
        if name == next(iter(self.described)):
            return self.dtype
        other = re.search(r"(\w+)'s? dtype", note)
        base = self.of(other[1]) if other else self.dtype
        if base.itemsize > 2 or not re.search("(in|or) fp32|any floating dtype", note):
            return base
        key = id(self.described[name])
        if key not in self.wide:
            self.wide[key] = self.is_wide()
        return torch.float32 if self.wide[key] else base


class Row(NamedTuple):
    op: str
    inputs: Mapping[str, tuple]
    parameters: Mapping[str, tuple] = {}
    options: Mapping[str, Any] = {}
    sizes: Mapping[str, Any] = SIZES


def has_rows(row: Row) -> bool:
    """Whether all inputs have the same leading dimensions, so that no row depends on others."""
    described = described_tensors(operators()[row.op])
    return all(described[name].shapes.startswith("(...") for name in row.inputs)


def multiplies_in_fp8(row: Row) -> bool:
    return "recipe" in operators()[row.op].choices


def is_constant(operator: Operator) -> bool:
    """Whether no result has a gradient. Such an operator's own file tests what test_every_operator.py tests of others."""
    tensors = [name for name, p in operator.__signature__.parameters.items() if p.annotation == "Tensor"]
    return all(name in operator.constants for name in tensors) and bool(tensors)


def with_batch(written: Sequence[str]) -> str:
    """The first of several shapes, but the batched one of rotary angles."""
    return written[-1] if written[-1].startswith("1 or B") else written[0]


def row_of(
    op: str,
    given: str = "",
    options: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    shapes: Mapping[str, str] | None = None,
) -> Row:
    """given: optional tensors. sizes: by letter. shapes: of tensors, as documentation writes them."""
    operator, options, sizes = operators()[op], options or {}, SIZES | (sizes or {})
    defaults = {name: p.default for name, p in operator.__signature__.parameters.items() if p.default is not p.empty}
    options = required_options(operator) | options
    made = Shapes(sizes.__getitem__, lambda: ["B", "S"], with_batch, defaults | options)
    inputs, parameters = {}, {}
    for name, shape in shapes_of(operator, made, given.split()).items():
        if name in options:
            continue
        if isinstance(shape[0], list):
            parameters |= {f"{name}[{i}]": tuple(of) for i, of in enumerate(shape)}
            continue
        shape = tuple(made.shape(shapes[name]) if name in (shapes or {}) else shape)
        is_input = {"B", "S"} & set(shape) or described_tensors(operator)[name].is_of("indices")
        (inputs if is_input else parameters)[name] = shape
    absent = [name for name in operator.types if name not in defaults | options | inputs | parameters]
    options |= {name: None for name in absent if "[" not in str(operator.types[name])}
    return Row(op, inputs, parameters, options, sizes | made.sizes)


def default_rows() -> Iterator[Row]:
    for op, operator in operators().items():
        if operator.alias_of or is_constant(operator):
            continue
        given = " ".join(optional_tensors(operator, {}))
        yield row_of(op, given)
        if given:
            yield row_of(op)


GEMMA, SPLIT = dict(offset=1.0, casting_mode="gemma"), dict(group=SOLO, classes=VOCABULARY)
SECTIONS, ANGLES_OF_SECTIONS = dict(mrope_section=[1, 1, 2]), dict.fromkeys(("cos", "sin"), "(3, 1, S, R)")
GPT_OSS = dict(interleaved=True, transposed=True, limit=7.0, alpha=1.702, up_offset=1.0)
TURNED = dict(gate_up="(E, H, 2 I)", down="(E, I, H)")
ADAPTERS = "gate_up_a gate_up_b down_a down_b"
CLASS_WEIGHTS, LOW_RANK = "bias ce_weight token_weight", "low_rank_input low_rank_weight"
TEACHER = dict(t_weight="(2 V, m)", t_bias="(2 V,)")
LOW_RANKS = "s_low_rank_input s_low_rank_weight t_low_rank_input t_low_rank_weight"

ROWS = [
    *default_rows(),
    row_of("rms_norm", "weight", GEMMA | dict(eps=1e-5)),
    row_of("rms_norm_gated", "weight", GEMMA | dict(activation="sigmoid", gate_first=True, group_size=8)),
    row_of("sigmoid_gate", shapes=dict(gate="(..., 1)")),
    row_of("delta_gates", "dt_bias", dict(beta_scale=2.0)),
    row_of("delta_gates", "dt_bias", shapes=dict(a="(..., n, d)", dt_bias="(n, d)")),
    row_of("delta_gates", "", dict(lower_bound=-5.0), shapes=dict(a="(..., n, d)")),
    row_of("hyper_pre", "", dict(norm_eps=1e-5, eps=1e-6, sinkhorn=3)),
    row_of("hyper_pre", "", dict(post_scale=1.5, post_eps=1e-3), shapes=dict(fn="(8, 4 n)", base="(8,)", scale="(2,)")),
    row_of("hyper_post", "", dict(rounded=False)),
    row_of("causal_conv1d", "seq_idx", dict(activation="none", dilation=2), dict(W=3)),
    row_of("causal_conv1d", "initial_state", sizes=dict(W=3)),
    row_of("causal_conv1d_split", "bias", dict(sizes=[2, 2, 8, 4], groups=2)),
    row_of("causal_conv1d_split", "seq_idx", dict(sizes=[4, 4, 8]), dict(W=3)),
    row_of("short_conv", "bias", sizes=dict(W=3)),
    row_of("layer_norm", "bias"),
    row_of("rope", "", dict(interleaved=True)),
    row_of("rope", "", dict(trailing=True), dict(R=2)),
    row_of("rope", "", dict(halves_out=True)),
    row_of("rope", "", SECTIONS, shapes=ANGLES_OF_SECTIONS),
    row_of("qk_norm_rope", "q_weight k_weight", GEMMA | dict(interleaved=True)),
    row_of("swiglu", "", dict(limit=0.5)),
    row_of("swiglu_packed", "", dict(limit=0.5)),
    row_of("swiglu_linear", "", dict(limit=0.5)),
    row_of("geglu_packed", "", dict(approximate="none")),
    row_of("geglu_linear", "bias", dict(approximate="none")),
    row_of("lora_linear", "", dict(a=[], b=[], scale=[])),
    row_of("fp8_linear", "", dict(recipe="rows_hp")),
    row_of("fp8_linear", "bias", dict(recipe="tensor")),
    row_of("fp8_linear", "", dict(recipe="blocks")),
    row_of("fp8_projections", "", dict(biases=[], recipe="rows_hp")),
    row_of("embedding", "", dict(padding_idx=1)),
    row_of("moe_experts", "gate_up_bias down_bias", GPT_OSS, shapes=TURNED),
    row_of("moe_experts", ADAPTERS, dict(gate_up_scale=0.5, down_scale=2.0)),
    row_of("cross_entropy", "", dict(label_smoothing=0.1, lse_square_scale=1e-3, softcap=20.0)),
    row_of("cross_entropy", "", dict(reduction="none")),
    row_of("kl_div", "", dict(log_target=True)),
    row_of("jsd", "", dict(reduction="none")),
    row_of("log_probs", "", dict(temperature=0.5, softcap=20.0, entropy=True)),
    row_of("moe_router", "", dict(top_k=3)),
    row_of("moe_router", "", dict(top_k=3, score="sigmoid", groups=4, top_groups=2, statistics=True)),
    row_of("moe_router", "bias", dict(top_k=3, score="sqrtsoftplus")),
    row_of("moe_router", "experts", dict(score="sqrtsoftplus")),
    row_of("moe_router", "bias token_weight", dict(normalize=False, statistics=True)),
    row_of("fused_linear_cross_entropy", "", dict(reduction="none", softcap=20.0)),
    row_of("fused_linear_cross_entropy", CLASS_WEIGHTS, dict(reduction="sum", label_smoothing=0.1)),
    row_of("fused_linear_cross_entropy", f"bias {LOW_RANK}", dict(softcap=20.0)),
    row_of("fused_linear_cross_entropy", LOW_RANK, dict(reduction="none")),
    row_of("fused_linear_divergence", "s_bias", dict(reduction="mean", beta=0.5)),
    row_of("fused_linear_divergence", "s_bias", dict(beta=1.0, s_softcap=20.0)),
    row_of("fused_linear_divergence", "s_bias t_bias vocab_map", dict(reduction="sum", t_softcap=20.0), shapes=TEACHER),
    row_of("fused_linear_divergence", f"s_bias {LOW_RANKS}", dict(reduction="mean")),
    row_of("fused_linear_log_probs", f"bias {LOW_RANK}", dict(entropy=True)),
    row_of("fused_linear_log_probs", "", dict(temperature=2.0, softcap=20.0, entropy=True, mean_logits=True)),
    row_of("fused_linear_log_probs", "", SPLIT),
    row_of("fused_linear_log_probs_with_log_sum_exp", "", dict(temperature=2.0, entropy=True)),
    row_of("fused_linear_log_probs", "", SPLIT | dict(entropy=True, sequence_dim=1)),
    row_of("fused_linear_divergence", "s_bias", SPLIT | dict(beta=0.5)),
    row_of("fused_linear_divergence", "s_bias", SPLIT | dict(reduction="sum", sequence_dim=1)),
    row_of("cross_entropy", "", SPLIT),
    row_of("cross_entropy_with_metrics", "", SPLIT),
    row_of("fused_linear_cross_entropy", "", SPLIT),
    row_of("fused_linear_cross_entropy", "", SPLIT | dict(reduction="none", sequence_dim=1)),
    row_of("fused_linear_cross_entropy_with_metrics", "", SPLIT),
    row_of("fused_linear_cross_entropy_with_log_probs", "", SPLIT),
]
NAMES = [" ".join([row.op, *map(str, row.options.values())]) for row in ROWS]


def in_lists(named: Mapping[str, Any]) -> dict[str, Any]:
    """A list `a` from the arguments "a[0]", "a[1]" and so on, which stand in order."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        if name.endswith("]"):
            found.setdefault(name.partition("[")[0], []).append(value)
        else:
            found[name] = value
    return found


def tensor_of(row: Row, name: str, shape: tuple, batch: int = 0, length: int = 0) -> Tensor:
    """In single precision."""
    own = dict(B=batch, S=length)
    sizes = {letter: own.get(size, size) for letter, size in row.sizes.items()}
    operator, argument = operators()[row.op], name.partition("[")[0]
    t = random_tensor(operator, argument, [own.get(n, n) for n in shape], sizes.__getitem__, scaled=SCALED)
    return t.to(SINGLE.get(t.dtype, t.dtype))


class RowModule(nn.Module):
    """Calls the operator on the row's inputs and on parameters that the module owns."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        if "group" in row.options:
            solo_group()
        self.op, self.names, self.options = getattr(torch.ops.liger, row.op), tuple(row.inputs), dict(row.options)
        self.overwrites = row.op.endswith("_")
        constants = operators()[row.op].constants
        self.fixed = tuple(k for k in row.parameters if k in constants)
        made = {k: tensor_of(row, k, s) for k, s in row.parameters.items()}
        for k in self.fixed:
            self.register_buffer(k, made[k])
        self.parameters_of_op = nn.ParameterDict({k: t for k, t in made.items() if k not in self.fixed})

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        named = dict(zip(self.names, inputs))
        if self.overwrites:
            named[self.names[0]] = named[self.names[0]] * 1
        named |= {k: getattr(self, k) for k in self.fixed}
        return self.op(**in_lists(named | dict(self.parameters_of_op.items())), **self.options)


def inputs_of(
    row: Row, batch: int, length: int, device: str = "cpu", requires_grad: bool = False
) -> tuple[Tensor, ...]:
    constants = operators()[row.op].constants

    def make(name: str, shape: tuple) -> Tensor:
        t = tensor_of(row, name, shape, batch, length).to(device)
        return t.requires_grad_(requires_grad and t.is_floating_point() and name not in constants)

    return tuple(make(name, shape) for name, shape in row.inputs.items())


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
