"""What every operator must do, for every row of calls.py: a new operator needs no own tests of these properties.

Its results and gradients are compared with its formula in its own file and in test_properties.py. Export has its own
file, as have transforms (test_func.py), compiled autograd and tensors without memory (test_memory.py).
"""

import re
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_ops._accuracy import noise_of
from liger_ops.reference import operators
from tests.support.calls import ROWS, WIDTH, has_rows, in_lists, outputs
from tests.support.checks import (
    OPCHECKS,
    autocast_of_fake_gpus,
    check_deterministic,
    check_inductor,
    check_no_double_backward,
    check_no_synchronization,
    check_one_graph,
    check_reads_only,
    check_replays,
    check_second_backward,
    equal,
    gradients,
    like,
    wanted_of,
)
from tests.support.layouts import SIZE_ONE, layouts_of
from tests.support.operator_calls import OPERATORS, PUBLIC, copied, differentiable, samples
from tests.support.rows import (
    FIRST,
    NAME_OF,
    PLAIN,
    Bound,
    bind,
    check_as_accurate,
    contiguous,
    each_row,
    in_tiers,
    of_leaves,
    of_temporaries,
    upstream_of,
)


def results(call: Bound, tensors: list[Tensor] | None = None) -> list[Tensor]:
    """All results, and the gradients of the differentiable ones for an upstream gradient of ones."""
    tensors = call.tensors if tensors is None else tensors
    found = call.op(*tensors)
    roots = [r for r in found if r.requires_grad]
    return [*found, *torch.autograd.grad(roots, wanted_of(tensors), [torch.ones_like(r) for r in roots])]


# ---- PyTorch's own checks


def with_learned(call: Bound, which: str) -> list[Tensor]:
    """ "all", "none" or "first": which of the tensors that may require a gradient do."""
    first = next(t for t in call.tensors if t.requires_grad)
    wanted = dict(all=call.tensors, none=(), first=[first])[which]
    return [t.detach().requires_grad_(t.requires_grad and any(t is w for w in wanted)) for t in call.tensors]


@pytest.mark.parametrize(
    "row, learned",
    [
        pytest.param(row, learned, id=f"{NAME_OF[id(row)]}-{learned}", marks=marks)
        for row in ROWS
        for learned, marks in (
            ("all", [] if row in FIRST else pytest.mark.thorough),
            ("none", pytest.mark.thorough),
            ("first", pytest.mark.thorough),
        )
        if learned == "all" or row in FIRST
    ],
)
def test_opcheck(row, learned, device):
    bound = bind(row, device)
    named = in_lists(dict(zip(bound.names, with_learned(bound, learned))))
    if row.op.endswith("_"):
        named["logits"] = named["logits"].detach()  # opcheck would overwrite a leaf
    torch.library.opcheck(getattr(torch.ops.liger, row.op).default, (), named | row.options, test_utils=OPCHECKS)


# These return rows that they do not write, which opcheck would compare.
UNWRITTEN = ("_moe_experts_fwd", "_moe_experts_sorted_fwd")


@pytest.mark.thorough
@pytest.mark.parametrize("op", [op for op in OPERATORS if op.startswith("_")])
@pytest.mark.library
def test_opcheck_of_private_operators(op, device):
    arguments = copied(op, samples()[op], device)
    checks = [name for name in OPCHECKS if op not in UNWRITTEN or name != "test_aot_dispatch_dynamic"]
    # It multiplies arguments, which PyTorch cannot do with 8-bit floats.
    if any(isinstance(t, Tensor) and t.dtype == torch.float8_e4m3fn for t in arguments.values()):
        checks.remove("test_schema")
    torch.library.opcheck(getattr(torch.ops.liger, op).default, (), arguments, test_utils=checks)


# ---- Autograd


@each_row
def test_inputs_are_not_written(row, device):
    bound = bind(row, device)
    check_reads_only(bound.differentiable, bound.tensors, bound.upstream())


@each_row
def test_runs_are_bitwise_equal(row, device):
    """With enough rows for several threads and programs."""
    bound = bind(row, device, batch=40, length=25)
    check_deterministic(bound.differentiable, bound.tensors, bound.upstream())


@each_row
def test_retain_graph_and_second_backward(row, device):
    bound = bind(row, device)
    check_second_backward(bound.differentiable, bound.tensors, bound.upstream())


@each_row
@pytest.mark.library
def test_double_backward_is_refused(row, device):
    bound = bind(row, device)
    family = re.sub("_with_.*$", "", row.op)  # variants that share a backward
    check_no_double_backward(family, bound.differentiable, bound.tensors, bound.upstream())


@each_row
@pytest.mark.library
def test_forward_mode_is_refused(row, device):
    """For a tangent of any tensor."""
    bound = bind(row, device)
    for i, t in enumerate(bound.tensors):
        if not t.requires_grad:
            continue
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(t.detach(), torch.ones_like(t))
            tensors = [dual if i == j else other.detach() for j, other in enumerate(bound.tensors)]
            with pytest.raises(RuntimeError, match=f"{row.op.removesuffix('_')}.*: forward-mode"):
                bound.op(*tensors)


def choices_of(wanted: list[int]) -> list[tuple[int, ...]]:
    """All of up to four, else each alone and all but one."""
    sizes = range(1, len(wanted)) if len(wanted) <= 4 else (1, len(wanted) - 1)
    return [kept for size in sizes for kept in combinations(wanted, size)]


@each_row
def test_gradients_do_not_depend_on_which_others_are_wanted(row, device):
    call = bind(row, device)
    upstream = upstream_of(call)
    wanted = [i for i, t in enumerate(call.tensors) if t.requires_grad]
    whole = gradients(call.op, call.tensors, upstream)
    results, of_all = whole[: len(upstream)], dict(zip(wanted, whole[len(upstream) :], strict=True))
    for kept in ((), *choices_of(wanted)):
        tensors = [t.detach().requires_grad_(i in kept) for i, t in enumerate(call.tensors)]
        ours, theirs = gradients(call.op, tensors, upstream), [*results, *(of_all[i] for i in kept)]
        if not equal(ours, theirs):
            check_as_accurate(row, call, ours, theirs, tensors, upstream, device)


# ---- Shapes and dtypes


def check_formula(bound: Bound, tensors: list[Tensor], noise: float = 0.0) -> None:
    ours = results(bound, tensors)
    theirs = results(bound._replace(op=bound.formula), tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype or not a.is_floating_point()
        allowed = dict(rtol=1.3e-6, atol=1e-5 + noise * float(b.abs().max())) if noise else {}
        torch.testing.assert_close(a, b.to(a.dtype), equal_nan=True, **allowed)


@each_row
@pytest.mark.parametrize("batch, length", [(0, 5), (3, 0), (0, 0)])
def test_empty(row, batch, length, device):
    bound = bind(row, device, batch, length)
    check_formula(bound, bound.tensors)


OF_ROWS = [row for row in ROWS if operators()[row.op].rows]


@in_tiers(OF_ROWS)
def test_rows_without_columns(row, device):
    def narrow(shapes):
        return {
            name: tuple(0 if n in (WIDTH, 2 * WIDTH, 4 * WIDTH) else n for n in shape) for name, shape in shapes.items()
        }

    bound = bind(row._replace(inputs=narrow(row.inputs), parameters=narrow(row.parameters)), device)
    if row.op == "embedding" and device == "cuda":
        # The CUDA kernel of torch 2.11 for the gradient of such a weight reads outside of its memory.
        assert [t.shape for t in results(bound, bound.tensors)] == [(3, 5, 0), bound.tensors[1].shape]
        return
    check_formula(bound, bound.tensors)


@in_tiers([row for row in ROWS if has_rows(row) and "sequence_dim" not in row.options])
def test_one_row_without_leading_dimensions(row, device):
    bound = bind(row, device)
    count = len(row.inputs)
    tensors = [t.detach()[0, 0].requires_grad_(t.requires_grad) for t in bound.tensors[:count]] + bound.tensors[count:]
    check_formula(bound, tensors, noise_of(row.op, device))


class Facts(TorchDispatchMode):
    """What is known of every result of our operators, also of those that users do not see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "liger":
            self.seen.append(
                (func.name(), [(t.shape, t.dtype, t.stride()) for t in tree_leaves(found) if isinstance(t, Tensor)])
            )
        return found


@in_tiers()
@pytest.mark.library
def test_meta(row):
    """Shapes, dtypes and strides of results and gradients are those of a computation, also for dense permuted inputs."""
    bound = bind(row, dtype=torch.bfloat16)
    permuted = [turned(t) if t.is_floating_point() and t.dim() > 2 else t for t in bound.tensors]
    for tensors in (bound.tensors, permuted):
        facts = []
        for given in (tensors, [t.detach().to("meta").requires_grad_(t.requires_grad) for t in tensors]):
            with Facts() as inner:
                found = results(bound, given)
            facts.append(([(t.shape, t.dtype, t.stride()) for t in found], inner.seen))
        assert facts[0] == facts[1]


def turned(t: Tensor) -> Tensor:
    """The same values with the first two dimensions exchanged in memory."""
    return t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(t.requires_grad)


# ---- Layouts


def check_layouts(row, call: Bound, runs: Sequence[Callable], wanted: Callable[[str], bool]) -> None:
    """Of one tensor at a time, and of all inputs, but for layouts that repeat a number: roundings of equal numbers add up."""
    count, device = len(call.tensors), call.tensors[0].device.type
    upstream = upstream_of(call)
    given = [*call.tensors, *upstream]
    names = [*call.names, *(f"upstream gradient {i}" for i in range(len(upstream)))]
    layouts = [layouts_of(t) for t in given]
    bad = []
    for of, places in [("all inputs", range(count)), *((name, [i]) for i, name in enumerate(names))]:
        for layout in filter(wanted, {name: None for i in places for name in layouts[i]}):
            if len(places) > 1 and layout.startswith(("expanded", "one number")):
                continue
            changes = [
                of_one.get(layout, contiguous) if i in places else contiguous for i, of_one in enumerate(layouts)
            ]
            # The same numbers: a layout may repeat some.
            same = [contiguous(change(t)).requires_grad_(t.requires_grad) for t, change in zip(given, changes)]
            tensors, grads = same[:count], same[count:]
            for run in runs:
                try:
                    theirs = run(call, tensors, grads, [contiguous] * len(given))
                    ours = run(call, tensors, grads, changes)
                    if not equal(ours, theirs):
                        check_as_accurate(row, call, ours, theirs, tensors, grads, device)
                except (RuntimeError, AssertionError) as error:
                    bad.append(f"{of}, {layout}, {run.__name__}: {error}".partition("\n")[0])
    assert not bad, "\n".join(["", *bad])


@pytest.fixture
def one_thread():
    """For many calls of few rows, to which a second thread adds nothing but the time to wake it."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@in_tiers()
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str)
def test_layouts(row, dtype, device):
    """Of every tensor, also of the upstream gradients, whether the caller holds them or backward may overwrite them."""
    runs = (of_leaves, of_temporaries)
    check_layouts(row, bind(row, device, dtype=dtype), runs, lambda layout: layout != SIZE_ONE)
    for sizes in ((1, 5), (3, 1), (1, 1)):
        check_layouts(row, bind(row, device, *sizes, dtype=dtype), runs, SIZE_ONE.__eq__)


# ---- Autocast


def contains_a_gemm(row) -> bool:
    """Or a convolution, which autocast treats alike."""
    words = ("linear", "projections", "moe_experts", "conv")
    return any(word in row.op for word in words)


def in_low_precision(row, bound: Bound) -> list[Tensor]:
    """The operands of GEMMs in bf16. Weights of tokens, classes and routes are no operands, and low-rank ones may be in fp32."""
    kept = ("ce_weight", "token_weight", *(["weight"] if row.op.startswith("moe_experts") else []))
    return [
        t if name in kept or "low_rank" in name else like(t, torch.bfloat16)
        for name, t in zip(bound.names, bound.tensors)
    ]


@in_tiers()
@pytest.mark.library
def test_autocast(row, device):
    """Operators with a GEMM run in low precision, others as they are. Gradients keep the dtypes of the leaves, and do
    not depend on whether backward runs inside."""
    bound = bind(row, device)
    with torch.autocast(device, torch.bfloat16):
        inside = results(bound)
        found = bound.op(*bound.tensors)
    roots = [r for r in found if r.requires_grad]
    outside = torch.autograd.grad(roots, wanted_of(bound.tensors), [torch.ones_like(r) for r in roots])
    assert equal(inside, [*found, *outside])
    assert [g.dtype for g in outside] == [t.dtype for t in wanted_of(bound.tensors)]
    expected = results(bound, in_low_precision(row, bound) if contains_a_gemm(row) else None)
    assert equal(found, expected[: len(found)])
    assert equal(outside, [g.to(t.dtype) for g, t in zip(expected[len(found) :], outside)])


# torch decides whether autocast runs norms in fp32, see their own tests.
@in_tiers([row for row in ROWS if row.op not in ("rms_norm", "layer_norm", "fused_add_rms_norm")])
@pytest.mark.library
def test_autocast_keeps_low_precision(row, device):
    bound = bind(row, device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        ours = results(bound)
    assert equal(ours, results(bound))


def test_autocast_treats_norms_as_torch_does():
    """Whether it runs them in float32 depends on the torch release."""
    with autocast_of_fake_gpus():
        x, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 16), (16,)))
        rms_norm, layer_norm = nnf.rms_norm(x, (16,), weight).dtype, nnf.layer_norm(x, (16,), weight).dtype
        assert torch.ops.liger.rms_norm(x, weight).dtype == rms_norm
        assert {t.dtype for t in torch.ops.liger.fused_add_rms_norm(x, x, weight)} == {rms_norm}
        assert torch.ops.liger.layer_norm(x, weight).dtype == layer_norm


# ---- Constants of the declarations


@pytest.mark.parametrize("op,name", [(op, name) for op in PUBLIC for name in operators()[op].constants])
def test_constants_must_not_require_a_gradient(op, name, device):
    for others in (copied, differentiable):
        given = others(op, samples()[op], device)
        given[name].requires_grad_()
        with pytest.raises(RuntimeError, match=f"^{op}: {name} must not require a gradient"):
            getattr(torch.ops.liger, op)(**given)


# ---- Compilation


@pytest.fixture
def new_cache():
    """All rows share the code that calls them, and torch.compile limits how often it compiles the same code."""
    torch._dynamo.reset()


@in_tiers(PLAIN)
@pytest.mark.usefixtures("new_cache")
def test_compile_makes_one_graph_for_all_sizes(row, device):
    # No size is also one of the row's own, so that torch.compile does not take them for the same.
    calls = [bind(row, device, *sizes) for sizes in ((5, 7), (6, 9), (10, 11))]
    check_one_graph(calls[0].differentiable, [(call.tensors, call.upstream()) for call in calls])


@pytest.mark.thorough
@pytest.mark.parametrize("op", sorted({row.op for row in ROWS}))
@pytest.mark.library
@pytest.mark.usefixtures("new_cache")
def test_inductor(op, device):
    row = next(row for row in ROWS if row.op == op)
    bound = bind(row, device)
    check_inductor(bound.differentiable, bound.tensors, bound.upstream())


def script(row, bound: Bound) -> torch.jit.ScriptModule:
    """TorchScript's parser reads the operator's name, keywords and options."""

    class Script(torch.jit.ScriptModule):  # a new class, because TorchScript keeps one type for each
        pass

    module, first = Script(), " * 1" if row.op.endswith("_") else ""  # a leaf must not be overwritten
    names = [name.replace("[", "_").rstrip("]") for name in bound.names]
    values = [f"{name}{first if i == 0 else ''}" for i, name in enumerate(names)]
    values_of = {name: str(value).replace("'", "") for name, value in in_lists(dict(zip(bound.names, values))).items()}
    given = [f"{name}={value}" for name, value in values_of.items()]
    given += [f"{name}={value!r}" for name, value in row.options.items()]
    parameters = ", ".join(f"{name}: Tensor" for name in names)
    module.define(f"def forward(self, {parameters}):\n  return torch.ops.liger.{row.op}({', '.join(given)})\n")
    return module


@each_row
def test_script(row, device, tmp_path):
    """A scripted call, after save and load, runs forward and backward at several sizes."""
    script(row, bind(row)).save(str(tmp_path / "module.pt"))
    loaded = torch.jit.load(str(tmp_path / "module.pt"))
    for sizes in ((3, 5), (4, 7)):
        bound = bind(row, device, *sizes)
        scripted = bound._replace(op=lambda *tensors: outputs(loaded(*tensors)))
        assert equal(results(scripted), results(bound))


# ---- On a GPU


@pytest.mark.gpu
@in_tiers()
def test_double_on_cuda_is_refused(row):
    bound = bind(row, "cuda", dtype=torch.float64)
    with pytest.raises(RuntimeError, match=f"{row.op}: .* must be float32, float16 or bfloat16 .got Double"):
        bound.op(*bound.tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_row
def test_no_synchronization_and_cuda_graph_capture(row, dtype):
    bound = bind(row, "cuda", batch=40, length=25, dtype=dtype)

    def step() -> list[Tensor]:
        # A live graph of another stream would break the capture.
        return [t.detach() for t in results(bound)]

    expected = check_no_synchronization(step)
    check_replays(step, expected)


# ---- What backward reads and writes

TWINS = {op for op in OPERATORS if op.endswith("_bwd_")}


def is_held(row) -> bool:
    """Whether the upstream gradient cannot become that of an input: it is also another's, or has another layout."""
    return "residual" in row.inputs and row.op == "sigmoid_gate" or "halves_out" in row.options


@each_row
def test_backward_overwrites_memory_that_nobody_holds(row, device):
    """If there is an operator for it. test_layouts compares the numbers."""
    bound = bind(row, device)
    upstream = upstream_of(bound)
    layouts = [contiguous] * (len(bound.tensors) + len(upstream))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        of_temporaries(bound, bound.tensors, upstream, layouts)
    ran = {event.name.removeprefix("liger::") for event in seen.events()} & {*OPERATORS}
    backward = {name for name in ran if name.startswith("_") and not name.endswith("_fwd")}
    assert backward
    if is_held(row):
        assert not TWINS & backward
    else:
        assert not TWINS & {f"{name}_" for name in backward}


def in_other_strides(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


@each_row
def test_saved_tensors_may_come_back_in_other_strides(row, device):
    """Hooks must preserve values, not strides. Numbers that are read from the wrong place differ by much more than GEMMs do."""
    bound = bind(row, device)
    expected = results(bound)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, in_other_strides):
        found = results(bound)
    for ours, theirs in zip(found, expected, strict=True):
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-3 * largest, equal_nan=True)
