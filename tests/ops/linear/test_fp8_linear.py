"""fp8_linear against its formula, and its operands against the operators that quantise."""

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from liger_ops import functional as F
from liger_ops._accuracy import noise_of
from liger_ops.reference.fp8_projections import RECIPES
from liger_ops.reference.quantize_blocks import for_each, tensor_in_e4m3
from tests.support.checks import CPU_DTYPES, check_op, overall_error, run_python
from tests.support.families.fp8 import fitting
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("needs_fp8")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def make(device, dtype=torch.float32, tokens=(2, 37), n=64, m=96, recipe="rows") -> tuple[Tensor, ...]:
    """x, weight, bias and dy, of at least these sizes."""
    torch.manual_seed(0)
    n, m = fitting(n, recipe), fitting(m, recipe)
    shapes = ((*tokens, n), (m, n), (m,), (*tokens, m))
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def formula(recipe):
    return lambda *tensors: F.fp8_linear.reference(*tensors, recipe=recipe)


def ours(recipe):
    return lambda *tensors: torch.ops.liger.fp8_linear(*tensors, recipe=recipe)


@pairwise(
    dtype=CPU_DTYPES, recipe=RECIPES, has_bias=[False, True], tokens=[(1,), (2, 37), (48,)], sizes=[(16, 16), (64, 336)]
)
def test_the_formula(dtype, recipe, has_bias, tokens, sizes, device):
    x, weight, bias, dy = make(device, dtype, tokens, *sizes, recipe)
    tensors = [t.requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))]
    check_op(ours(recipe), formula(recipe), tensors, [dy], device, noise=noise_of("fp8_linear", device))


def dequantised(pair) -> Tensor:
    return pair[0].double() * pair[1].double()


def of_rows(t: Tensor, recipe: str, is_weight: bool = False) -> Tensor:
    """What the numbers of rows become."""
    if recipe in ("rows", "rows_hp"):
        return dequantised(F.quantize_rows(t))
    if recipe == "tensor":
        return dequantised(tensor_in_e4m3(t))
    q, scale = F.quantize_blocks(t, block="128x128" if is_weight else "1x128")
    return dequantised((q, for_each(scale, q, *(2 if is_weight else 1) * (128,))))


def of_columns(t: Tensor, recipe: str, is_weight: bool = False) -> Tensor:
    """Transposed."""
    if recipe in ("rows", "rows_hp"):
        return dequantised(F.quantize_columns(t))
    return of_rows(t.t().contiguous(), recipe, is_weight)


SUMS = """
import sys, torch
from liger_ops import functional as F
for n in (1024, 4096):
    torch.manual_seed(0)
    x, weight = torch.rand(64, n, device="cuda"), torch.rand(96, n, device="cuda")
    def exact(t):
        q, scale = F.quantize_rows(t)
        return q.double() * scale.double()
    for sign in (1, torch.randn(64, n, device="cuda").sign()):
        y, magnitudes = F.fp8_linear(sign * x, weight), exact(x) @ exact(weight).t()
        print(float(((y.double() - exact(sign * x) @ exact(weight).t()).abs() / magnitudes).max()))
"""


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("fast", [True, False])
def test_sums_of_one_sign(fast):
    """Fast accumulation cuts the sum off at 11 bits for each 32 products. Without it, tensor cores cut 128 products off at 13."""
    done = run_python(SUMS, LIGER_OPS_FP8_FAST_ACCUMULATION=str(int(fast)))
    short, mixed_short, long, mixed_long = map(float, done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert max(mixed_short, mixed_long) <= 2**-11
    for n, error in ((1024, short), (4096, long)):
        assert error <= (n / 32 * 2**-10.5 if fast else 2**-9)
        assert error > 2**-8 or not fast


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rows", "tensor"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_sums_over_rows_keep_their_digits(dtype, recipe):
    """Those of the weight's gradient are not fast. The rest is TF32 and the tensor cores' own sums."""
    x, weight, _, dy = make("cuda", dtype, (5, 48), 512, 256)
    (dw,) = torch.autograd.grad(F.fp8_linear(x, weight.requires_grad_(), recipe=recipe), weight, dy)
    exact = of_columns(dy.flatten(0, 1), recipe) @ of_columns(x.flatten(0, 1), recipe).t()
    assert overall_error(dw, exact) <= torch.finfo(dtype).eps + 2**-10


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
        assert overall_error(a, b) < math.sqrt(2) / 16 / math.sqrt(3) + 0.01


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
    made = make(device, torch.bfloat16, (48,), 64, 96, recipe)
    x, weight, bias, _ = (t.requires_grad_(i in learned) for i, t in enumerate(made))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(recipe)(x, weight, bias)
    return sum(t.nbytes for t in kept if t.data_ptr() != weight.data_ptr())


def test_saved_tensors(device):
    """8 bits of x for the weight's gradient, x itself with rows_hp, scales of the weight's columns for that of x, and
    nothing for the others."""
    # 48 tokens are padded to 128.
    assert saved_bytes("tensor", (0, 1, 2), device) == 128 * 64 + 4 + 4
    assert saved_bytes("blocks", (0, 1, 2), device) == 128 * 128 + 128 * 4
    for recipe in ("tensor", "blocks"):
        assert saved_bytes(recipe, (0,), device) == (4 if recipe == "tensor" else 0)
        assert saved_bytes(recipe, (2,), device) == 0
    scales = 64 * 4
    assert saved_bytes("rows", (0, 1, 2), device) == 48 * 64 + scales + scales
    assert saved_bytes("rows", (1, 2), device) == 48 * 64 + scales
    assert saved_bytes("rows_hp", (0, 1, 2), device) == 48 * 64 * 2 + scales
    for recipe in ("rows", "rows_hp"):
        assert saved_bytes(recipe, (0, 2), device) == saved_bytes(recipe, (0,), device) == scales
        assert saved_bytes(recipe, (2,), device) == 0


def test_only_what_is_needed_is_asked_for(device):
    x, weight, bias, dy = make(device)
    with Products() as seen:
        F.fp8_linear(x, weight, bias)
        F.fp8_linear(x.requires_grad_(), weight).backward(dy)
        F.fp8_projections(x.detach(), [weight, weight.clone().requires_grad_()], [bias, bias]).sum().backward()
    assert seen.wanted == [[True, False, False], [False, False, True, False, False]]


@each_recipe
def test_operands_are_those_of_the_quantising_operators(recipe, device):
    """Products with the identity, whose numbers are quantised without an error, show each operand."""
    for n in (128, 384):
        t = torch.randn(n, n, device=device) * torch.logspace(-3, 3, n, device=device)[torch.randperm(n), None]
        t[3], t[:, 5], t[7, ::2] = 0, 0, t[7].abs().max()
        one = torch.eye(n, device=device)
        x, weight = t.clone().requires_grad_(), t.clone().requires_grad_()
        by_one = F.fp8_linear(x, one.requires_grad_(), recipe=recipe)
        of_one = F.fp8_linear(one, weight, recipe=recipe)
        found = {
            "x": (by_one, of_rows(t, recipe)),
            "weight": (of_one.t(), of_rows(t, recipe, True)),
            "dy": (torch.autograd.grad(by_one, x, t, retain_graph=True)[0], of_rows(t, recipe)),
            "weight's columns": (torch.autograd.grad(of_one, one, one.detach())[0], of_columns(t, recipe, True).t()),
        }
        if recipe != "rows_hp":
            (of_dy,) = torch.autograd.grad(F.fp8_linear(one.detach(), weight, recipe=recipe), weight, t)
            (of_x,) = torch.autograd.grad(F.fp8_linear(t, weight, recipe=recipe), weight, one.detach())
            found |= {"dy's columns": (of_dy, of_columns(t, recipe)), "x's columns": (of_x.t(), of_columns(t, recipe))}
        for name, (product, operand) in found.items():
            # The neighbour of a number in e4m3 is at least 1 / 16 of it away. The scales are rounded.
            assert torch.allclose(product.double(), operand, rtol=2**-20, atol=0), name


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


@pytest.mark.parametrize("recipe", ["tensor", "blocks"])
def test_compiles_to_one_graph_for_every_number_of_tokens(recipe, device):
    """Which these recipes pad to multiples of 128."""
    _, weight, _, _ = make(device, n=256, m=384, recipe=recipe)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    weight.requires_grad_()
    compiled = torch.compile(
        lambda x: F.fp8_linear(x, weight, recipe=recipe), fullgraph=True, dynamic=True, backend=backend
    )
    for tokens in (200, 333, 512, 140):
        x, dy = torch.randn(tokens, 256, device=device), torch.randn(tokens, 384, device=device)
        (found,) = torch.autograd.grad(compiled(x), weight, dy)
        (expected,) = torch.autograd.grad(F.fp8_linear(x, weight, recipe=recipe), weight, dy)
        assert torch.equal(found, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("recipe", ["tensor", "blocks"])
def test_nan_and_infinity_reach_the_results(recipe, device):
    """Of the whole tensor, or of the products of one block."""
    x, weight, _, dy = make(device, tokens=(130,), n=256, m=256, recipe=recipe)
    weight.requires_grad_()
    for number in (math.nan, math.inf):
        spoilt = x.clone()
        spoilt[1, 3] = number
        y = F.fp8_linear(spoilt, weight, recipe=recipe)
        (dw,) = torch.autograd.grad(y, weight, dy)
        assert y[1].isnan().all() and dw[:, 3].isnan().all()
        assert y.isnan().all() if recipe == "tensor" else y[2:].isfinite().all() and dw[:, 4:].isfinite().all()


@pytest.mark.parametrize("recipe", ["tensor", "blocks"])
def test_every_number_of_tokens(recipe, device):
    """Padding adds zeros alone: the first rows are those of fewer tokens, whose largest number is the same."""
    x, weight, _, dy = make(device, torch.bfloat16, (300,), 256, 384, recipe)
    x[0], dy[0] = 8, 8
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = F.fp8_linear(*leaves, recipe=recipe)
    (dx,) = torch.autograd.grad(y, x, dy)
    for tokens in (1, 127, 128, 129, 256, 257):
        part = F.fp8_linear(x[:tokens], weight, recipe=recipe)
        (dpart, dw) = torch.autograd.grad(part, leaves, dy[:tokens])
        assert part.shape == (tokens, 384) and dw.shape == weight.shape and not dpart[tokens:].any()
        # GEMMs of other sizes sum in another order.
        for a, b in ((part, y[:tokens]), (dpart[:tokens], dx[:tokens])):
            assert overall_error(a, b) <= 2**-7


ERRORS = {
    "features of x": (dict(x=(2, 24), weight=(96, 24)), "features of x must be a multiple of 16"),
    "features of weight": (dict(x=(2, 64), weight=(40, 64)), "features of weight must be a multiple of 16"),
    "recipe": (
        dict(x=(2, 64), weight=(96, 64), recipe="columns"),
        "recipe must be 'rows', 'rows_hp', 'tensor' or 'blocks'",
    ),
    "features of x in blocks": (
        dict(x=(2, 64), weight=(96, 64), recipe="blocks"),
        "features of x must be a multiple of 128 with the recipe 'blocks'",
    ),
    "features of weight in blocks": (
        dict(x=(2, 128), weight=(64, 128), recipe="blocks"),
        "features of weight must be a multiple of 128 with the recipe 'blocks'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    """Others are in test_wrong_calls.py."""
    given, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"fp8_linear: {message}.*got "):
        F.fp8_linear(**{name: torch.ones(v) if isinstance(v, tuple) else v for name, v in given.items()})
