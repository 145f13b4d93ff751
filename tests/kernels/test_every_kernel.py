"""Operators on their kernels, in Triton's interpreter: every row of calls.py, at widths on both sides of those at which tables
choose another config."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import liger_ops.kernels as tables
from liger_ops import functional as F
from liger_ops.aot.codegen import operators_of
from liger_ops.kernels.moe import moe_router
from liger_ops.reference import operators
from liger_ops.reference._calls import letters_of
from tests.support.calls import ROWS, SIZE, VOCABULARY, WIDTH, Row, multiplies_in_fp8, row_of
from tests.support.checks import ROOT
from tests.support.host import kernel_process
from tests.support.host.solo_group import SOLO
from tests.support.kernel_calls import CASES
from tests.support.rows import (
    FIRST,
    NAME_OF,
    Bound,
    Change,
    bind,
    check_as_accurate,
    contiguous,
    of_leaves,
    of_temporaries,
    upstream_of,
)

# The gradient of an embedding needs kernels if many tokens share a row.
WITHOUT = ("embedding",)
# Columns. A router has no more experts, and many heads are slow.
NARROW, MOST = 1100, {"moe_router": 1024, "delta_gates": 1100}


def with_nan_behind(t: Tensor) -> Tensor:
    """The same rows in a wider tensor."""
    if not t.is_floating_point() or not t.dim():
        return t.detach().clone()
    n = t.shape[-1]
    return torch.cat([t.detach(), torch.full((*t.shape[:-1], 8), float("nan"), dtype=t.dtype)], -1)[..., :n]


launched_by = cache(operators_of)


@cache
def kernels_of(op: str) -> list[tables.Kernel]:
    stems = {stem for stems in launched_by().values() for stem in stems if op.startswith(stem)}
    own = max(stems, key=len, default="")
    return [kernel for kernel in tables.kernels() if own in launched_by().get(kernel.name, [])]


def own_kernels(row: Row) -> set[str]:
    """Those that have its name."""
    names = {kernel.name for kernel in tables.kernels()}
    return names & {row.op, f"{row.op}_fwd", f"{row.op}_bwd"} if row.op not in WITHOUT else set()


def unit_of(row: Row) -> int:
    """The size of calls.py that is the number of columns of the row's kernels."""
    letters = letters_of(operators()[row.op])
    return SIZE if "D" in letters else VOCABULARY if "V" in letters else WIDTH


def is_fixed(row: Row) -> bool:
    """Whether other sizes depend on the number of columns, or the bounds of configs are no columns."""
    words = ("conv", "moe_experts", "lora")
    options = {"group_size", "classes", "mrope_section", "groups"}
    return any(word in row.op for word in words) or not options.isdisjoint(row.options)


def widths(row: Row) -> Iterator[int]:
    unit = unit_of(row)
    yield unit
    if is_fixed(row):
        return
    kernels, base = kernels_of(row.op), operators()[row.op].base
    own = [k for k in kernels if k.name.startswith(base.__name__ if base else row.op)]
    found = set()
    for kernel in own or kernels:
        for config in kernel.configs:
            if config.max_n:
                found |= {config.max_n, config.max_n + 1}
            elif "BLOCK_N" in config.constexprs:  # a second block of columns
                found.add(config.constexprs["BLOCK_N"] + 1)
    step, most = (2, 2048) if unit == SIZE else (1, MOST.get(row.op, 17_000))
    found = {n for n in found if 2 * unit < n <= most and n % step == 0}
    # The operator whose name the kernels have runs at all widths.
    yield from sorted(n for n in found if n < NARROW or n == max(found) or (own and not base))


def scaled(row: Row, n: int) -> Row:
    unit = unit_of(row)

    def resized(shapes):
        return {
            name: tuple(d // unit * n if isinstance(d, int) and d % unit == 0 and d else d for d in shape)
            for name, shape in shapes.items()
        }

    return row._replace(inputs=resized(row.inputs), parameters=resized(row.parameters))


def cases() -> Iterator:
    """Of the first row of an operator all widths, of which narrow ones and the widest are quick. Of other rows narrow ones, of
    which the first is quick, but for convolutions, which are slow. Dtypes and layouts take turns."""
    seen = set()
    for row in ROWS:
        if multiplies_in_fp8(row):  # which needs a GPU
            continue
        found = [*widths(row)]
        if row.op in seen:
            found = [n for n in found if n < NARROW]
        for i, n in enumerate(found):
            # Kernels of adapters multiply half-precision rows alone.
            dtype = torch.float16 if i % 2 or row.op == "lora_linear" else torch.float32
            is_quick = not i if row.op in seen else n < NARROW or n == found[-1]
            is_quick &= "conv" not in row.op or row.op not in seen
            marks = [] if is_quick else [pytest.mark.thorough]
            yield pytest.param(row, n, dtype, i // 2 % 2, marks=marks, id=f"{NAME_OF[id(row)]}-{n}-{str(dtype)[6:]}")
        seen.add(row.op)


def check_call(call: Bound, row: Row, run: Callable = of_leaves, change: Change = contiguous) -> None:
    """Results and gradients on kernels, against the formula."""
    formula = call._replace(op=call.formula)
    upstream = upstream_of(formula)
    count = len(call.tensors) + len(upstream)
    theirs = of_leaves(formula, call.tensors, upstream, [contiguous] * count)
    kernel_process.launched.clear()
    ours = run(call, call.tensors, upstream, [change] * count)
    check_as_accurate(row, call, ours, theirs, call.tensors, upstream, "cuda")


def with_wide_parameters() -> Iterator:
    """Of each operator that takes fp32 beside half-precision rows."""
    for row in FIRST:
        narrow, wide = (bind(row, dtype=torch.bfloat16, wide=wide).tensors for wide in (False, True))
        if [t.dtype for t in narrow] != [t.dtype for t in wide] and not multiplies_in_fp8(row):
            yield pytest.param(row, id=NAME_OF[id(row)])


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("row", with_wide_parameters())
def test_wide_parameters(row, device):
    check_call(bind(row, batch=2, length=3, dtype=torch.bfloat16, wide=True), row, of_temporaries)
    assert own_kernels(row) <= kernel_process.kernels_launched()


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("row, n, dtype, held", cases())
def test_rows(row, n, dtype, held, device):
    # Narrow rows in several blocks.
    batch, length = (5, 9) if n == unit_of(row) and not is_fixed(row) else (2, 3)
    call = bind(scaled(row, n), batch=batch, length=length, dtype=dtype)
    check_call(call, row, *((of_leaves, with_nan_behind) if held else (of_temporaries, contiguous)))
    assert own_kernels(row) <= kernel_process.kernels_launched()
    has_kernels = row.op not in WITHOUT and row.options.get("a") != []
    assert kernel_process.launched or not has_kernels


def more_calls() -> Iterator:
    for i, case in enumerate(CASES):
        yield pytest.param(i, marks=[] if case.quick else [pytest.mark.thorough], id=f"{case.row.op}-{i}")


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("i", more_calls())
def test_more_calls(i, device):
    case = CASES[i]
    kernel_process.imitate(*case.device)
    call = bind(case.row, batch=case.sizes[0], length=case.sizes[1], dtype=case.dtype)
    named = dict(zip(call.names, call.tensors))
    with torch.no_grad():
        found = case.change(named)
    if isinstance(found, dict):
        named |= {name: t.detach().requires_grad_(named[name].requires_grad) for name, t in found.items()}
    check_call(call._replace(tensors=[*named.values()]), case.row)
    assert not set(case.launches.split()) - kernel_process.kernels_launched()


@pytest.mark.parametrize("device", ["interpreted"])
def test_tokens_that_share_a_row(device):
    """More than PyTorch adds up itself. Sums are compensated, and infinite elements do not spread."""
    input, dout = torch.arange(3200) % 2, torch.rand(3200, 13)
    dout[2, 0], dout[6, 1] = torch.inf, -torch.inf
    weight = torch.randn(3, 13, requires_grad=True)
    F.embedding(input, weight, padding_idx=1).backward(dout)
    assert kernel_process.kernels_launched() == {"embedding_bwd"}
    exact = torch.zeros(3, 13, dtype=torch.float64).index_add(0, input, dout.double())
    exact[1] = 0
    torch.testing.assert_close(weight.grad.double(), exact, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


# ---- Indices that GPUs cannot check


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("op", [F.cross_entropy, F.cross_entropy_, F.fused_linear_cross_entropy])
def test_targets_that_do_not_exist(op, device):
    """Their losses are NaN, and other rows are those beside ignored ones. The last reads as 3 if its high word is forgotten."""
    target = torch.arange(12) % 5
    bad = torch.tensor([1, 2, 6])
    ignored = target.index_fill(0, bad, -100)
    target[bad] = torch.tensor([20, -3, 3 + 2**40])
    given = [torch.randn(12, 20)]
    if op is F.fused_linear_cross_entropy:
        given = [torch.randn(12, 16).bfloat16(), torch.randn(20, 16).bfloat16()]
    options = dict(reduction="none") | (dict(memory_budget=4000) if len(given) > 1 else {})

    def results(target: Tensor) -> tuple[Tensor, Tensor]:
        x, *rest = (t.clone().requires_grad_() for t in given)
        loss = op(x * 1, *rest, target, **options)
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        return loss.detach(), dx

    others = (ignored != -100).nonzero().flatten()
    (loss, dx), (expected, d_expected) = results(target), results(ignored)
    assert loss[bad].isnan().all() and torch.equal(loss[others], expected[others])
    assert torch.equal(dx[others], d_expected[others])


# On CPU the operators of the others check them, so that kernels are launched here.


@pytest.mark.parametrize("device", ["interpreted"])
def test_experts_that_do_not_exist(device):
    rows, n, count = 9, 20, 4
    logits, given = torch.randn(rows, n), torch.randint(n, (rows, count))
    given[3, 0], given[4, 1], given[5, 2], given[6] = -1, n, 2**32 + 1, -(2**63)
    exists = (given >= 0) & (given < n)
    weights, index = torch.full((rows, count), torch.nan), torch.full((rows, count), -7)
    variant = tables.find("moe_router_fwd").pick(dict(X="fp32", GROUPED=0), n, False)
    flags = moe_router.NORMALIZE.value | moe_router.HAS_EXPERTS.value
    sums = torch.full((3, n), torch.nan)
    variant.kernel.function[(1,)](
        weights, index, *sums, logits, logits, logits, given, rows, n, count, 1, n, 1, 1.0, 1e-20, flags,
        **variant.constexprs,
    )  # fmt: skip
    assert torch.equal(index, given.where(exists, -1)) and not weights[~exists].any()
    whole = exists.all(1)
    expected = F.moe_router.reference(logits[whole], count, experts=given[whole]).weights
    torch.testing.assert_close(weights[whole], expected)


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("counts, ends", [((-5, 31, 2**31 - 1), (0, 31, 33)), ((2**62, -(2**62), 2**62), (33, 33, 33))])
def test_counts_that_are_wrong(counts, ends, device):
    """Of rows of experts. No row is read twice, and none beside the last."""
    offsets, tiles = torch.full((4,), -7, dtype=torch.int32), torch.full((7,), -7, dtype=torch.int32)
    totals = torch.tensor(counts).view(torch.int32)
    variant = tables.find("moe_experts_scan").pick({}, 3, False)
    variant.kernel.function[(3,)](offsets, tiles, totals, totals, 33, 3, 0, 2, **variant.constexprs)
    assert offsets.tolist() == [0, *ends]


# Tests of operators that calls.py calls without dropout, and with few tokens.
LORA = ROOT / "tests" / "ops" / "linear" / "test_lora_linear.py"
HALF = dict(dtype=torch.bfloat16, wide=True)
ADAPTERS = {
    "pieces rows columns expand": ("test_dropout", HALF | dict(rows=70, n=136, ranks=(8, 8, 8), dropout=(0.25,) * 3)),
    "drop": ("test_dropout", dict(dtype=torch.float32, wide=False, rows=70, n=37, ranks=(16,), dropout=(0.5,))),
    "rows_columns": ("test_many_rows", HALF | dict(ranks=(8, 16), features=(264, 40))),
}


@pytest.mark.parametrize("kernels", ADAPTERS)
def test_adapters(kernels, pytestconfig):
    function, arguments = ADAPTERS[kernels]
    launched = kernel_process.started().ask(
        path=str(LORA), function=function, arguments=arguments | dict(device="cpu"), **kernel_process.SETTINGS
    )
    assert {f"lora_{name}" for name in kernels.split()} <= {name.partition("[")[0] for name in launched}


# ---- Classes that are split over processes

SPLIT = [row for row in ROWS if row.options.get("group") == SOLO and "sequence_dim" not in row.options]
SPLIT.append(row_of("cross_entropy", "weight", dict(group=SOLO, classes=VOCABULARY)))
CLASSES = 15, VOCABULARY - 15


def test_classes_of_two_ranks(tmp_path):
    with ThreadPoolExecutor(len(CLASSES)) as pool:
        arguments = dict(path=__file__, function="run_rank", **kernel_process.SETTINGS)
        asked = [
            pool.submit(
                kernel_process.started(i).ask, arguments=dict(rank=i, store=str(tmp_path / "store")), **arguments
            )
            for i in range(len(CLASSES))
        ]
    for names in (one.result() for one in asked):
        assert {name.partition("[")[0] for name in names} >= {"cross_entropy_combine", "cross_entropy_describe"}


def run_rank(rank, store):
    ranks = len(CLASSES)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        for row in SPLIT:
            check_rank(row, rank)
    finally:
        dist.destroy_process_group()


def check_rank(row: Row, rank: int) -> None:
    dtype = torch.bfloat16 if row.op.startswith("fused_linear_cross") else torch.float32
    split = row.options | dict(group=dist.group.WORLD.group_name, class_sizes=CLASSES)
    call, of_rank = (bind(r, batch=2, length=3, dtype=dtype) for r in (row, row._replace(options=split)))

    def own(t: Tensor) -> Tensor:
        of_all = t.dim() == 1 and not t.requires_grad  # weights of classes
        if VOCABULARY not in t.shape or of_all:
            return t
        part = t.detach().split(CLASSES, t.shape.index(VOCABULARY))[rank]
        return part.clone().requires_grad_(t.requires_grad)

    def whole(gradient: Tensor, t: Tensor) -> Tensor:
        if VOCABULARY not in t.shape:
            return gradient
        parts = [None] * len(CLASSES)
        dist.all_gather_object(parts, gradient)
        return torch.cat(parts, t.shape.index(VOCABULARY))

    formula = call._replace(op=call.formula)
    upstream = upstream_of(formula)
    changes = [contiguous] * (len(call.tensors) + len(upstream))
    theirs = of_leaves(formula, call.tensors, upstream, changes)
    ours = of_leaves(of_rank, [own(t) for t in call.tensors], upstream, changes)
    results, gradients = ours[: len(upstream)], ours[len(upstream) :]
    gradients = [whole(g, t) for g, t in zip(gradients, (t for t in call.tensors if t.requires_grad))]
    check_as_accurate(row, call, results + gradients, theirs, call.tensors, upstream, "cuda")


# ---- Every kernel

# The GEMMs need a GPU, and so do operators that launch kernels beside them: see test_exponentials_kernels.py and
# test_statistics_kernels.py.
BESIDE_GEMMS = {
    *(f"fused_linear_cross_entropy_{name}" for name in ("exp_logits", "true_logits", "add_sums", "weigh", "rescale")),
    *("linear_statistics", "linear_statistics_combine", "linear_chosen", "linear_gradients"),
}
# See test_quantizers.py.
OF_QUANTIZERS = {
    kernel.name for kernel in tables.kernels() if kernel.name.startswith(("quantize_", "column_", "tensor_"))
}


def test_every_kernel_runs():
    """Tests of calls demand the kernels that they name."""
    reached = set().union(*(own_kernels(row) for row in ROWS), *(case.launches.split() for case in CASES))
    reached |= {f"lora_{name}" for names in ADAPTERS for name in names.split()}
    reached |= {"cross_entropy_combine", "cross_entropy_describe", "embedding_bwd"}
    assert {kernel.name for kernel in tables.kernels()} - reached == BESIDE_GEMMS | OF_QUANTIZERS - {"column_sum"}
