"""fp8_linear against its formula, and its gradients against products of the same quantised operands."""

import math

import pytest
import torch
from checks import CPU_DTYPES, HALF_TYPES, check_op, path_taken
from pairs import pairwise
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import noise_of

RECIPES = ("rows", "rows_hp")
pytestmark = pytest.mark.usefixtures("needs_fp8")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def vary(draw, arguments) -> None:
    """Sizes that GEMMs take."""
    for name, t in arguments.items():
        if isinstance(t, Tensor):
            shape = [size if name == "x" and i < t.dim() - 1 else 16 * size for i, size in enumerate(t.shape)]
            made = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(t.dtype)
            arguments[name] = made.requires_grad_(t.requires_grad)


def make(device, dtype=torch.float32, tokens=(2, 37), n=64, m=96) -> tuple[Tensor, ...]:
    """x, weight, bias and dy."""
    torch.manual_seed(0)
    shapes = ((*tokens, n), (m, n), (m,), (*tokens, m))
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def formula(recipe):
    return lambda *tensors: F.fp8_linear.reference(*tensors, recipe=recipe)


def ours(recipe):
    return lambda *tensors: torch.ops.liger.fp8_linear(*tensors, recipe=recipe)


@pairwise(
    dtype=CPU_DTYPES, recipe=RECIPES, has_bias=[False, True], tokens=[(1,), (2, 37), (48,)], sizes=[(16, 16), (64, 96)]
)
def test_the_formula(dtype, recipe, has_bias, tokens, sizes, device):
    x, weight, bias, dy = make(device, dtype, tokens, *sizes)
    tensors = [t.requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))]
    check_op(ours(recipe), formula(recipe), tensors, [dy], device, noise=noise_of("fp8_linear", device))


def dequantised(pair) -> Tensor:
    return pair[0].double() * pair[1].double()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm())


@each_recipe
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_results_are_products_of_quantised_operands(recipe, dtype, device):
    """The error against fp64 is that of the product in fp32, rounded once. Fast accumulation on tensor cores, in forward and
    for x, keeps 13 bits of the largest sum."""
    x, weight, _, dy = make(device, dtype, (5, 48), 512, 256)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = F.fp8_linear(x, weight, recipe=recipe)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    rows, upstream, w = x.detach().flatten(0, 1), dy.flatten(0, 1), weight.detach()
    of_rows, of_columns = (lambda t: dequantised(F.quantize_rows(t))), (lambda t: dequantised(F.quantize_columns(t)))
    exact = {
        "y": of_rows(rows) @ of_rows(w).t(),
        "dx": of_rows(upstream) @ of_columns(w).t(),
        "dw": of_columns(upstream) @ of_columns(rows).t()
        if recipe == "rows"
        else upstream.double().t() @ rows.double(),
    }
    rounding, fast = torch.finfo(dtype).eps, 2**-8 if device == "cuda" else 0.0
    # TF32 and the tensor cores' own sums.
    sums = 2**-10 if device == "cuda" else 2**-20
    for name, found in dict(y=y.detach().flatten(0, 1), dx=dx.flatten(0, 1), dw=dw).items():
        assert error(found, exact[name]) <= rounding + sums + (0.0 if name == "dw" else fast), name


@each_recipe
def test_error_against_the_unquantised_product(recipe, device):
    """Two operands, each with an error of at most 1 / 16 of a number, evenly distributed."""
    x, weight, _, dy = make(device, torch.bfloat16, (64,), 512, 256)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = [y := F.fp8_linear(*leaves, recipe=recipe), *torch.autograd.grad(y, leaves, dy)]
    exact = [
        z := torch.nn.functional.linear(*(t.double() for t in leaves)),
        *torch.autograd.grad(z, leaves, dy.double()),
    ]
    for a, b in zip(found, exact):
        assert error(a, b) < math.sqrt(2) / 16 / math.sqrt(3) + 0.01


@each_recipe
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_frozen_tensors(recipe, wanted, device):
    """The gradients of the others are the same bits, and no gradient is computed for frozen ones."""
    x, weight, bias, dy = make(device)
    every = [t.clone().requires_grad_() for t in (x, weight, bias)]
    full = torch.autograd.grad(ours(recipe)(*every), every, dy)
    some = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, weight, bias))]
    found = torch.autograd.grad(ours(recipe)(*some), [some[i] for i in wanted], dy)
    assert all(torch.equal(a, full[i]) for a, i in zip(found, wanted))


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.wanted = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.liger._fp8_projections_bwd.default:
            self.wanted.append(args[7])
        return function(*args, **(kwargs or {}))


def saved_bytes(recipe, learned, device) -> int:
    """By autograd, besides the weight."""
    x, weight, bias, _ = (
        t.requires_grad_(i in learned) for i, t in enumerate(make(device, torch.bfloat16, (48,), 64, 96))
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(recipe)(x, weight, bias)
    return sum(t.nbytes for t in kept if t.data_ptr() != weight.data_ptr())


def test_saved_tensors(device):
    """8 bits of x for the weight's gradient, x itself with rows_hp, scales of the weight's columns for that of x, and
    nothing for the others."""
    scales = 64 * 4
    assert saved_bytes("rows", (0, 1, 2), device) == 48 * 64 + scales + scales
    assert saved_bytes("rows", (1, 2), device) == 48 * 64 + scales
    assert saved_bytes("rows_hp", (0, 1, 2), device) == 48 * 64 * 2 + scales
    for recipe in RECIPES:
        assert saved_bytes(recipe, (0, 2), device) == saved_bytes(recipe, (0,), device) == scales
        assert saved_bytes(recipe, (2,), device) == 0


def test_only_what_is_needed_is_asked_for(device):
    x, weight, bias, dy = make(device)
    with Products() as seen:
        F.fp8_linear(x, weight, bias)
        F.fp8_linear(x.requires_grad_(), weight).backward(dy)
        F.fp8_projections(x.detach(), [weight, weight.clone().requires_grad_()], [bias, bias]).sum().backward()
    assert seen.wanted == [[True, False], [False, False, True, False, False]]


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_layouts(layout, device):
    x, weight, _, dy = make(device, tokens=(6, 8))
    views = {
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": lambda t: torch.cat([t, t], -1),
    }
    changed = [views[layout](t)[..., : t.shape[-1]] for t in (x, weight, dy)]
    plain, other = ([t.detach().requires_grad_() for t in (a, b)] for a, b in ((x, weight), changed[:2]))
    for a, b in zip(
        torch.autograd.grad(F.fp8_linear(*plain), plain, dy),
        torch.autograd.grad(F.fp8_linear(*other), other, changed[2]),
    ):
        assert torch.equal(a, b)


def test_a_changed_weight_is_seen(device):
    """No copy of it is kept, whatever writes it."""
    x, weight, _, dy = make(device)
    layer = torch.nn.Linear(64, 96, bias=False, device=device)
    layer.load_state_dict({"weight": weight})
    for change in (
        lambda: layer.weight.data.mul_(2), lambda: layer.load_state_dict({"weight": 3 * weight}),
        lambda: torch._foreach_add_([layer.weight.detach()], 1.0), lambda: layer.weight.detach().view(torch.int32).zero_(),
    ):  # fmt: skip
        change()
        expected = F.fp8_linear(x, layer.weight.detach().clone())
        assert torch.equal(F.fp8_linear(x, layer.weight), expected)


@each_recipe
def test_gradients_accumulate(recipe, device):
    x, weight, bias, dy = make(device)
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    for _ in range(2):
        ours(recipe)(x, *leaves).backward(dy)
    once = torch.autograd.grad(ours(recipe)(x, *leaves), leaves, dy)
    assert all(torch.equal(t.grad, 2 * g) for t, g in zip(leaves, once))


@each_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(recipe, use_reentrant, device):
    x, weight, bias, dy = make(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    expected = torch.autograd.grad(ours(recipe)(*leaves), leaves, dy)
    torch.utils.checkpoint.checkpoint(ours(recipe), *leaves, use_reentrant=use_reentrant).backward(dy)
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, expected))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_autocast(dtype, device):
    x, weight, bias, dy = make(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(device, dtype):
        y = F.fp8_linear(*leaves)
    assert y.dtype == dtype
    found = torch.autograd.grad(y, leaves, dy.to(dtype))
    low = [t.detach().to(dtype).requires_grad_() for t in leaves]
    expected = torch.autograd.grad(F.fp8_linear(*low), low, dy.to(dtype))
    assert all(a.dtype == torch.float32 and torch.equal(a, b.float()) for a, b in zip(found, expected))


@each_recipe
@pytest.mark.parametrize("tokens", [(0,), (2, 0)])
def test_empty(recipe, tokens, device):
    x, weight, bias, dy = make(device, tokens=tokens)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = ours(recipe)(*leaves)
    assert y.shape == (*tokens, 96)
    y.backward(dy)
    assert x.grad.shape == x.shape and not weight.grad.any() and not bias.grad.any()


def test_path(device):
    x, weight, bias, _ = make(device)
    with path_taken(device):
        F.fp8_linear(x, weight, bias)


@pytest.mark.gpu
def test_cuda_graph():
    x, weight, _, dy = make("cuda", torch.bfloat16, (48,))
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def step():
        y = F.fp8_linear(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def wrong(**changes):
    given = dict(zip(("x", "weight", "bias"), make("cpu"))) | changes
    return lambda: F.fp8_linear(**given)


ERRORS = {
    "features of x": (wrong(x=torch.ones(2, 24), weight=torch.ones(96, 24)), "features of x must be a multiple of 16"),
    "features of weight": (
        wrong(weight=torch.ones(40, 64), bias=None), "features of weight must be a multiple of 16",
    ),
    "shape of weight": (wrong(weight=torch.ones(96, 32)), r"weight must have shape \[features, 64\]"),
    "vector": (wrong(weight=torch.ones(64)), "weight must have two dimensions"),
    "bias": (wrong(bias=torch.ones(64)), r"bias must have shape \[96\]"),
    "dtype of weight": (wrong(weight=torch.ones(96, 64).half()), "weight must have the dtype of x"),
    "dtype of bias": (wrong(bias=torch.ones(96).double()), "bias must have the dtype of x"),
    "integers": (wrong(x=torch.ones(2, 64).long()), "x must be float32, float16, bfloat16 or float64"),
    "recipe": (wrong(recipe="blocks"), "recipe must be 'rows' or 'rows_hp'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"fp8_linear: {message}.*got "):
        call()
