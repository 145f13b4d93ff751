"""A module that calls one operator, for every operator that has a gradient. Plain operators have rows by their
declaration; those below are of other operators, or have other shapes and options.

B (batch) and S (sequence) vary between calls.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from declared import is_constant, plain_operators, shapes_of
from solo_group import SOLO, solo_group
from stub_cuda import scratch
from torch import Tensor, nn

import liger_ops
from liger_ops.reference import operators

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp"
HEADS, SIZE, WIDTH, VOCABULARY = 2, 8, 16, 24
DTYPES = {"freqs_cis": torch.complex64}


class Row(NamedTuple):
    op: str
    inputs: Mapping[str, tuple]
    parameters: Mapping[str, tuple] = {}
    options: Mapping[str, Any] = {}


HIDDEN, PACKED, LOGITS, TARGET = ("B", "S", WIDTH), ("B", "S", 2 * WIDTH), ("B", "S", VOCABULARY), ("B", "S")
QUERY, ANGLES = ("B", HEADS, "S", SIZE), (1, "S", SIZE)
NORM, GATED_NORM = dict(x=HIDDEN), dict(x=HIDDEN, gate=HIDDEN)
ROPE = dict(q=QUERY, k=QUERY, cos=ANGLES, sin=ANGLES)
BCX = dict(bcx=("B", "S", 3 * WIDTH))
QKVZ, TWO_GROUPS = dict(x=PACKED), dict(sizes=[2, 2, 8, 4], groups=2)
HEAD_NORMS = dict(q_weight=(SIZE,), k_weight=(SIZE,))
GATED, LOSS, LINEAR_LOSS = (
    dict(gate=HIDDEN, up=HIDDEN),
    dict(logits=LOGITS, target=TARGET),
    dict(input=HIDDEN, target=TARGET),
)
DIVERGENCE, CHOICE = dict(input=LOGITS, target=LOGITS), dict(logits=LOGITS, index=TARGET)
SCALE, HEAD = dict(weight=(WIDTH,)), dict(weight=(VOCABULARY, WIDTH))
MODELS = dict(s_input=HIDDEN, t_input=HIDDEN)
HEADS_OF_MODELS = dict(s_weight=(VOCABULARY, WIDTH), t_weight=(VOCABULARY, WIDTH), s_bias=(VOCABULARY,))
LOW_RANK_MODELS = dict(s_low_rank_input=("B", "S", 3), t_low_rank_input=("B", "S", 2))
LOW_RANK_HEADS = dict(s_low_rank_weight=(VOCABULARY, 3), t_low_rank_weight=(VOCABULARY, 2))
DOWN = dict(weight=(VOCABULARY, WIDTH), bias=(VOCABULARY,))
LOW_RANK, LOW_RANK_WEIGHT = dict(low_rank_input=("B", "S", 3)), dict(low_rank_weight=(VOCABULARY, 3))
ADAPTERS = {"a[0]": (3, WIDTH), "a[1]": (2, WIDTH), "b[0]": (VOCABULARY, 3), "b[1]": (VOCABULARY, 2)}
STACKED = {"weights[0]": (2 * WIDTH, WIDTH), "weights[1]": (WIDTH, WIDTH)}
ROUTES, EXPERTS = ("B", 2), 3
MOE = dict(x=("B", WIDTH), index=ROUTES, weight=ROUTES)
EXPERT_WEIGHTS = dict(gate_up=(EXPERTS, 2 * SIZE, WIDTH), down=(EXPERTS, WIDTH, SIZE))
TURNED_WEIGHTS = dict(gate_up=(EXPERTS, WIDTH, 2 * SIZE), down=(EXPERTS, SIZE, WIDTH))
EXPERT_BIASES = dict(gate_up_bias=(EXPERTS, 2 * SIZE), down_bias=(EXPERTS, WIDTH))
EXPERT_ADAPTERS = dict(
    gate_up_a=(EXPERTS, 3, WIDTH), gate_up_b=(EXPERTS, 2 * SIZE, 3), down_a=(EXPERTS, 2, SIZE),
    down_b=(EXPERTS, WIDTH, 2),
)  # fmt: skip
GPT_OSS = dict(interleaved=True, transposed=True, limit=7.0, alpha=1.702, up_offset=1.0)
STREAMS, HYPER = ("B", "S", 4, WIDTH), dict(fn=(24, 4 * WIDTH), base=(24,), scale=(3,))
SPLIT = dict(group=SOLO, classes=VOCABULARY)


def default_rows() -> Iterator[Row]:
    """Of plain operators: with all tensors, and without the optional ones. Tensors without "..." are parameters."""
    for op, operator in plain_operators().items():
        if is_constant(operator):
            continue
        shapes = shapes_of(operator, ("B", "S"), WIDTH)
        needed = {n: shape for n, shape in shapes.items() if operator.__signature__.parameters[n].default is not None}
        for given in (shapes, needed) if needed != shapes else (shapes,):
            inputs = {name: shape for name, shape in given.items() if shape[:2] == ("B", "S")}
            yield Row(op, inputs, {name: shape for name, shape in given.items() if name not in inputs})


ROWS = [
    *default_rows(),
    Row("rms_norm", NORM, SCALE, dict(eps=1e-5, offset=1.0, casting_mode="gemma")),
    Row(
        "rms_norm_gated",
        GATED_NORM,
        SCALE,
        dict(offset=1.0, casting_mode="gemma", activation="sigmoid", gate_first=True, group_size=8),
    ),
    Row("sigmoid_gate", dict(x=HIDDEN, gate=("B", "S", 1))),
    Row("delta_gates", dict(a=HIDDEN, b=HIDDEN), dict(a_log=(WIDTH,), dt_bias=(WIDTH,)), dict(beta_scale=2.0)),
    Row("delta_gates", dict(a=("B", "S", WIDTH, 4), b=HIDDEN), dict(a_log=(WIDTH,), dt_bias=(WIDTH, 4))),
    Row("delta_gates", dict(a=("B", "S", WIDTH, 4), b=HIDDEN), dict(a_log=(WIDTH,)), dict(lower_bound=-5.0)),
    Row("hyper_pre", dict(streams=STREAMS), HYPER, dict(norm_eps=1e-5, eps=1e-6, sinkhorn=3)),
    Row(
        "hyper_pre",
        dict(streams=STREAMS),
        dict(fn=(8, 4 * WIDTH), base=(8,), scale=(2,)),
        dict(norm_eps=1e-5, eps=1e-6, post_scale=1.5, post_eps=1e-3),
    ),
    Row("hyper_post", dict(y=HIDDEN, streams=STREAMS, post=STREAMS[:3]), {}, dict(rounded=False)),
    Row("causal_conv1d", NORM, dict(weight=(WIDTH, 4), bias=(WIDTH,))),
    Row("causal_conv1d", NORM | dict(seq_idx=TARGET), dict(weight=(WIDTH, 3)), dict(activation="none", dilation=2)),
    Row("causal_conv1d", NORM | dict(initial_state=("B", 2, WIDTH)), dict(weight=(WIDTH, 3))),
    Row("causal_conv1d_split", QKVZ, dict(weight=(3 * WIDTH // 2, 4), bias=(3 * WIDTH // 2,)), TWO_GROUPS),
    Row("causal_conv1d_split", NORM | dict(seq_idx=TARGET), dict(weight=(WIDTH, 3)), dict(sizes=[4, 4, 8])),
    Row("short_conv", BCX, dict(weight=(WIDTH, 3), bias=(WIDTH,))),
    Row("short_conv", BCX | dict(seq_idx=TARGET), dict(weight=(WIDTH, 4))),
    Row("layer_norm", NORM, dict(bias=(WIDTH,))),
    Row("rope", ROPE),
    Row("rope", ROPE, {}, dict(interleaved=True)),
    Row("rope", ROPE | dict(cos=(1, "S", 2), sin=(1, "S", 2)), {}, dict(trailing=True)),
    Row("rope", ROPE, {}, dict(halves_out=True)),
    Row("rope", ROPE | dict(cos=(3, *ANGLES), sin=(3, *ANGLES)), {}, dict(mrope_section=[1, 1, 2])),
    Row("rope_freqs_cis", dict(q=QUERY, k=QUERY, freqs_cis=("S", SIZE // 2))),
    Row("qk_norm_rope", ROPE, HEAD_NORMS),
    Row("qk_norm_rope", ROPE, HEAD_NORMS, dict(offset=1.0, casting_mode="gemma", interleaved=True)),
    Row("qk_norm_rope", ROPE, {}, dict(q_weight=None, k_weight=None)),
    Row("swiglu", GATED, {}, dict(limit=0.5)),
    Row("swiglu_packed", dict(gate_up=PACKED), {}, dict(limit=0.5)),
    Row("swiglu_linear", GATED, DOWN),
    Row("swiglu_linear", GATED, HEAD, dict(limit=0.5)),
    Row("geglu_packed", dict(gate_up=PACKED), {}, dict(approximate="none")),
    Row("geglu_linear", GATED, DOWN, dict(approximate="none")),
    Row("lora_linear", dict(x=HIDDEN), DOWN | ADAPTERS, dict(scale=[0.5, 2.0])),
    Row("lora_linear", dict(x=HIDDEN), HEAD, dict(a=[], b=[], scale=[])),
    Row("fp8_linear", dict(x=HIDDEN), dict(weight=(2 * WIDTH, WIDTH), bias=(2 * WIDTH,))),
    Row("fp8_linear", dict(x=HIDDEN), dict(weight=(2 * WIDTH, WIDTH)), dict(recipe="rows_hp")),
    Row("fp8_projections", dict(x=HIDDEN), STACKED | {"biases[0]": (2 * WIDTH,), "biases[1]": (WIDTH,)}),
    Row("fp8_projections", dict(x=HIDDEN), STACKED, dict(biases=[], recipe="rows_hp")),
    Row("fp8_linear", dict(x=HIDDEN), dict(weight=(2 * WIDTH, WIDTH), bias=(2 * WIDTH,)), dict(recipe="tensor")),
    Row("fp8_linear", dict(x=("B", "S", 128)), dict(weight=(256, 128)), dict(recipe="blocks")),
    Row("embedding", dict(input=TARGET), HEAD),
    Row("embedding", dict(input=TARGET), HEAD, dict(padding_idx=1)),
    Row("moe_experts", MOE, EXPERT_WEIGHTS),
    Row("moe_experts", MOE, TURNED_WEIGHTS | EXPERT_BIASES, GPT_OSS),
    Row("moe_experts", MOE, EXPERT_WEIGHTS | EXPERT_ADAPTERS, dict(gate_up_scale=0.5, down_scale=2.0)),
    Row("moe_experts_sorted", dict(x=("B", WIDTH), tokens_per_expert=(EXPERTS,)), EXPERT_WEIGHTS),
    Row("cross_entropy", LOSS, {}, dict(label_smoothing=0.1, lse_square_scale=1e-3, softcap=20.0)),
    Row("cross_entropy", LOSS, {}, dict(reduction="none")),
    Row("cross_entropy_", LOSS),
    Row("cross_entropy_with_metrics", LOSS),
    Row("kl_div", DIVERGENCE, {}, dict(log_target=True)),
    Row("kl_div", DIVERGENCE | dict(shift_labels=TARGET)),
    Row("jsd", DIVERGENCE, {}, dict(reduction="none")),
    Row("tvd", DIVERGENCE),
    Row("log_probs", CHOICE),
    Row("log_probs", CHOICE, {}, dict(temperature=0.5, softcap=20.0, entropy=True)),
    Row("moe_router", dict(logits=LOGITS), {}, dict(top_k=3)),
    Row("moe_router", dict(logits=LOGITS), {}, dict(top_k=3, score="sigmoid", groups=4, top_groups=2, statistics=True)),
    Row("moe_router", dict(logits=LOGITS), dict(bias=(VOCABULARY,)), dict(top_k=3, score="sqrtsoftplus")),
    Row("moe_router", dict(logits=LOGITS, experts=("B", "S", 2)), {}, dict(top_k=2, score="sqrtsoftplus")),
    Row(
        "moe_router",
        dict(logits=LOGITS, token_weight=TARGET),
        dict(bias=(VOCABULARY,)),
        dict(top_k=2, normalize=False, statistics=True),
    ),
    Row("fused_linear_cross_entropy", LINEAR_LOSS, HEAD),
    Row("fused_linear_cross_entropy", LINEAR_LOSS, HEAD, dict(reduction="none", softcap=20.0)),
    Row(
        "fused_linear_cross_entropy",
        LINEAR_LOSS | dict(token_weight=TARGET),
        DOWN | dict(ce_weight=(VOCABULARY,)),
        dict(reduction="sum", label_smoothing=0.1),
    ),
    Row("fused_linear_cross_entropy", LINEAR_LOSS | LOW_RANK, DOWN | LOW_RANK_WEIGHT, dict(softcap=20.0)),
    Row("fused_linear_cross_entropy", LINEAR_LOSS | LOW_RANK, HEAD | LOW_RANK_WEIGHT, dict(reduction="none")),
    Row("fused_linear_cross_entropy_with_metrics", LINEAR_LOSS, HEAD),
    Row("fused_linear_cross_entropy_with_log_probs", LINEAR_LOSS, HEAD),
    Row("fused_linear_divergence", MODELS, HEADS_OF_MODELS, dict(reduction="mean", beta=0.5)),
    Row("fused_linear_divergence", MODELS, HEADS_OF_MODELS, dict(beta=1.0, s_softcap=20.0)),
    Row(
        "fused_linear_divergence",
        MODELS | dict(vocab_map=(VOCABULARY,)),
        HEADS_OF_MODELS | dict(t_weight=(2 * VOCABULARY, WIDTH), t_bias=(2 * VOCABULARY,)),
        dict(reduction="sum", t_softcap=20.0),
    ),
    Row("fused_linear_divergence", MODELS | LOW_RANK_MODELS, HEADS_OF_MODELS | LOW_RANK_HEADS, dict(reduction="mean")),
    Row("fused_linear_log_probs", LINEAR_LOSS, HEAD),
    Row("fused_linear_log_probs", LINEAR_LOSS | LOW_RANK, DOWN | LOW_RANK_WEIGHT, dict(entropy=True)),
    Row(
        "fused_linear_log_probs", LINEAR_LOSS, HEAD, dict(temperature=2.0, softcap=20.0, entropy=True, mean_logits=True)
    ),
    Row("fused_linear_log_probs", LINEAR_LOSS, HEAD, SPLIT),
    Row("fused_linear_log_probs", LINEAR_LOSS, HEAD, SPLIT | dict(entropy=True, sequence_dim=1)),
    Row("fused_linear_divergence", MODELS, HEADS_OF_MODELS, SPLIT | dict(beta=0.5)),
    Row("fused_linear_divergence", MODELS, HEADS_OF_MODELS, SPLIT | dict(reduction="sum", sequence_dim=1)),
    Row("cross_entropy", LOSS, {}, SPLIT),
    Row("cross_entropy_with_metrics", LOSS, {}, SPLIT),
    Row("fused_linear_cross_entropy", LINEAR_LOSS, HEAD, SPLIT),
    Row("fused_linear_cross_entropy", LINEAR_LOSS, HEAD, SPLIT | dict(reduction="none", sequence_dim=1)),
    Row("fused_linear_cross_entropy_with_metrics", LINEAR_LOSS, HEAD, SPLIT),
    Row("fused_linear_cross_entropy_with_log_probs", LINEAR_LOSS, HEAD, SPLIT),
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


class Call(nn.Module):
    """Calls the operator on the row's inputs and on parameters that the module owns."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        if "group" in row.options:
            solo_group()
        self.op, self.names, self.options = getattr(torch.ops.liger, row.op), tuple(row.inputs), dict(row.options)
        self.overwrites = row.op.endswith("_")
        constants = operators()[row.op].constants
        self.fixed = tuple(k for k in row.parameters if k in constants)
        # Results of experts stay near 1, so that rounding errors of two products do too.
        made = {k: torch.randn(s) * (s[-1] ** -0.5 if len(s) == 3 else 1.0) for k, s in row.parameters.items()}
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
    def make(name: str, shape: tuple) -> Tensor:
        sizes = [dict(B=batch, S=length).get(d, d) for d in shape]
        if shape == TARGET and name != "token_weight":
            return torch.randint(VOCABULARY, sizes, device=device)
        if name in ("index", "experts"):
            return torch.randint(EXPERTS, sizes, device=device)
        if name == "vocab_map":
            return 2 * torch.arange(*sizes, device=device)
        if name == "tokens_per_expert":
            return (torch.arange(*sizes, device=device) % 2).clamp(max=batch)
        wanted = requires_grad and name not in ("cos", "sin", "freqs_cis", *operators()[row.op].constants)
        return torch.randn(sizes, device=device, dtype=DTYPES.get(name, torch.float32), requires_grad=wanted)

    return tuple(make(name, shape) for name, shape in row.inputs.items())


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def run(*command: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure_cpp(source: Path, target: Path) -> subprocess.CompletedProcess:
    """Runs CMake on a project that finds torch and this package."""
    prefixes = f"{torch.utils.cmake_prefix_path};{Path(liger_ops.__file__).parent}"
    command = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(target), f"-DCMAKE_PREFIX_PATH={prefixes}"]
    return subprocess.run(command, capture_output=True, text=True)


@cache
def cpp_program(name: str) -> Path:
    """Builds a program of examples/cpp once and returns its path."""
    folder = scratch() / "cpp"
    done = configure_cpp(EXAMPLE, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    run("cmake", "--build", folder, "--target", name)
    return folder / name


def libraries_of(program: Path) -> set[str]:
    """Names, without versions, of the shared libraries that a program loads at startup."""
    return {line.split()[0].split(".so")[0] for line in run("ldd", program).splitlines()}


def example() -> ModuleType:
    """The model of examples/cpp."""
    path = EXAMPLE / "model.py"
    spec = importlib.util.spec_from_file_location("example_model", path)
    module = importlib.util.module_from_spec(spec)
    # torch.export in strict mode looks the module up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
