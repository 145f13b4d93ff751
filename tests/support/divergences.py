"""Tests of kl_div, jsd and tvd. Each operator is a subclass of DivergenceTests.

A subclass defines `name`, the option values to test as `choices`, whether the target holds log-probabilities with them
(`in_logs`), and `plain(input, target, **options)`, which computes the unreduced losses in another way than the reference.
"""

import itertools
import math

import pytest
import torch
from checks import (
    CPU_DTYPES,
    HALF_TYPES,
    assert_no_worse,
    gradients,
    like,
    path_taken,
    roundings,
)
from pairs import pairwise
from torch import Tensor

from liger_ops.reference import operators

# Widths that no vector length divides, on both sides of the CPU loop lengths (512 and 8192), and a real vocabulary.
SIZES = [7, 33, 1000, 8192, 9001, 50257]
# On both sides of the variant table's limits.
SIZES_OF_KERNELS = [64, 72, 256, 264, 2048, 2056, 32000]
REDUCTIONS = ["mean", "batchmean", "sum", "none"]
LABELS = [None, torch.int64, torch.int32]

LAYOUTS = {
    "contiguous": lambda x: x,
    "part of wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "without the last position": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "transposed, dense": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided last dimension": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "misaligned": lambda x: torch.cat([x.flatten(), x.new_zeros(1)]).roll(1)[1:].view(x.shape),
    "every other row": lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


def noise(name, input, target, shift_labels=None, reduction="", ignore_index=-100, **options):
    """The rounding error of the terms, relative to the losses: terms of opposite sign cancel."""
    x, t = input.detach().double(), target.detach().double()
    losses = operators()[name].reference(x, t, shift_labels, reduction="none", ignore_index=ignore_index, **options)
    sizes = losses.abs()
    beta = options.get("beta", 0.5)
    if name == "jsd" and beta not in (0, 1):
        log_m = torch.logaddexp(t + math.log(beta), x + math.log(1 - beta))
        # log m has the rounding error of m.
        sizes = beta * t.exp() * ((t - log_m).abs() + 0.5) + (1 - beta) * x.exp() * ((x - log_m).abs() + 0.5)
    if sizes.numel() == 0:
        return 0.0
    if reduction == "none":
        ratio = sizes.max() / losses.abs().max().clamp(min=1e-30)
    else:
        ratio = sizes.sum() / losses.sum().abs().clamp(min=1e-30)
    return float(ratio) * torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps


class DivergenceTests:
    name: str
    choices: list[dict]

    def in_logs(self, options: dict) -> bool:
        raise NotImplementedError

    @staticmethod
    def plain(input: Tensor, target: Tensor, **options) -> Tensor:
        raise NotImplementedError

    @property
    def op(self):
        return getattr(torch.ops.liger, self.name)

    def make(self, shape, dtype, device, options=None, labels=None, ignored=0.3):
        """Distributions, and labels of which at least one counts."""
        options = self.choices[0] if options is None else options
        logits, others = (2 * torch.randn(shape, device=device) for _ in range(2))
        x = logits.log_softmax(-1) if self.name != "tvd" else logits.softmax(-1)
        t = others.log_softmax(-1) if self.in_logs(options) else others.softmax(-1)
        y = None
        if labels is not None:
            y = torch.randint(5, shape[:-1], device=device).to(labels)
            y[torch.rand(shape[:-1], device=device) < ignored] = -100
            y.view(-1)[:1] = 0
        return x.to(dtype).requires_grad_(), t.to(dtype), y

    def check(self, inputs, device, **options):
        """Losses and gradients against the formula in fp64, for a random upstream gradient."""
        call = lambda *tensors: self.op(*tensors, **options)  # noqa: E731
        formula = lambda *tensors: operators()[self.name].reference(*tensors, **options)  # noqa: E731
        with path_taken(device):
            loss = call(*(t if t is None else t.detach() for t in inputs))
        grad = [torch.randn(loss.shape, device=device)]
        with path_taken(device):
            ours = gradients(call, [like(t) for t in inputs], grad)
        assert torch.equal(ours[0].detach(), loss)
        eager = gradients(formula, [like(t) for t in inputs], grad)
        oracle = gradients(formula, [like(t, torch.float64) for t in inputs], grad)
        bounds = roundings(formula, inputs, grad, oracle)
        error = noise(self.name, *inputs, **dict(reduction="mean") | options)
        if device == "cuda" and inputs[0].dtype in HALF_TYPES:
            error *= 4  # exponentials and logarithms of 16-bit rows have fewer digits
        assert_no_worse("loss", ours[0], eager[0], oracle[0], noise=error, bounds=(bounds, 0))
        if inputs[0].requires_grad:
            # Exponentials are accurate to 2 ulp in our kernels, to 1 ulp in eager.
            ulp = torch.finfo(torch.float32).eps if device == "cuda" and ours[1].dtype == torch.float32 else 0.0
            assert_no_worse("gradient", ours[1], eager[1], oracle[1], noise=ulp, bounds=(bounds, 1))

    # ---- Values

    @pairwise(n=SIZES, dtype=CPU_DTYPES, labels=[None, torch.int64], reduction=["batchmean", "none"])
    def test_sizes(self, n, dtype, labels, reduction, device):
        for options in self.choices:
            inputs = self.make((6, n), dtype, device, options, labels)
            self.check(inputs, device, reduction=reduction, **options)

    @pytest.mark.gpu
    @pairwise(n=SIZES_OF_KERNELS, dtype=CPU_DTYPES, labels=[None, torch.int64], reduction=["batchmean", "none"])
    def test_sizes_of_kernels(self, n, dtype, labels, reduction):
        self.test_sizes(n, dtype, labels, reduction, "cuda")

    @pairwise(dtype=CPU_DTYPES, reduction=REDUCTIONS, labels=LABELS)
    def test_options(self, dtype, reduction, labels, device):
        for options in self.choices:
            inputs = self.make((3, 5, 136), dtype, device, options, labels)
            self.check(inputs, device, reduction=reduction, **options)

    def test_the_formula_against_another(self):
        for options, labels in itertools.product(self.choices, (None, torch.int64)):
            x, t, y = self.make((4, 3, 9), torch.float64, "cpu", options, labels)
            losses = self.plain(x, t, **options)
            counted = torch.ones(4, 3, dtype=torch.bool) if y is None else y != -100
            losses = losses * counted[..., None]
            for reduction, by in {"none": 1, "sum": 1, "mean": counted.sum() * 9, "batchmean": counted.sum()}.items():
                if self.name == "kl_div" and reduction == "batchmean" and y is None:
                    by = 4
                expected = (losses if reduction == "none" else losses.sum()) / by
                found = operators()[self.name].reference(x, t, y, reduction=reduction, **options)
                torch.testing.assert_close(found, expected)
                torch.testing.assert_close(
                    *(torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (found, expected))
                )

    @pairwise(labels=[torch.int64, torch.int32], ignore_index=[-100, -1, 0, 3, 2**31 - 1, 2**40])
    def test_ignored_labels(self, labels, ignore_index, device):
        if ignore_index > torch.iinfo(labels).max:
            ignore_index = 4
        x, t, _ = self.make((40, 11), torch.float32, device)
        y = torch.arange(40, device=device).remainder(5).to(labels)
        y[::3] = ignore_index
        self.check((x, t, y), device, ignore_index=ignore_index, **self.choices[0])

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_all_labels_ignored(self, reduction, device):
        """A mean over no rows is NaN, as in PyTorch; the gradient is zero."""
        x, t, y = self.make((4, 24), torch.float32, device, labels=torch.int64)
        loss = self.op(x, t, y.fill_(-100), reduction=reduction)
        assert loss.isnan().all() if "mean" in reduction else not loss.any()
        assert not torch.autograd.grad(loss.sum(), x)[0].any()

    def test_ignored_rows_are_not_read(self, device):
        for reduction, n in itertools.product(("batchmean", "none"), (24, 2049)):
            x, t, y = self.make((6, n), torch.float32, device, labels=torch.int64)
            expected = self.op(x, t, y, reduction=reduction)
            (slope,) = torch.autograd.grad(expected.sum(), x)
            with torch.no_grad():
                x[y == -100] = t[y == -100] = math.nan
            loss = self.op(x, t, y, reduction=reduction)
            assert torch.equal(loss, expected) and torch.equal(torch.autograd.grad(loss.sum(), x)[0], slope)

    @pairwise(
        shape=[(0, 8), (2, 0, 8), (8,), (0, 0), (3, 0), (3, 1), (3, 2), (1, 40)], reduction=REDUCTIONS,
        labels=[None, torch.int64],
    )  # fmt: skip
    def test_empty_and_one_dimensional(self, shape, reduction, labels, device):
        for options in self.choices:
            x, t, y = self.make(shape, torch.float32, device, options, labels)
            results = [f(x, t, y, reduction=reduction, **options) for f in (self.op, operators()[self.name].reference)]
            torch.testing.assert_close(*results, equal_nan=True)
            wide = [like(v, torch.float64) for v in (x, t)]
            exact = operators()[self.name].reference(*wide, y, reduction=reduction, **options)
            slopes = [torch.autograd.grad(r.sum(), v)[0] for r, v in zip((*results, exact), (x, x, wide[0]))]
            assert_no_worse("gradient", *slopes, scale=1.0)

    @pytest.mark.parametrize("dtypes", [*itertools.permutations([*CPU_DTYPES, torch.float64], 2)])
    def test_mixed_dtypes(self, dtypes):
        for options in self.choices:
            x, t, y = self.make((5, 24), torch.float32, "cpu", options, torch.int64)
            x, t = x.detach().to(dtypes[0]).requires_grad_(), t.to(dtypes[1])
            wide = torch.promote_types(*dtypes)
            loss, expected = self.op(x, t, y, **options), self.op(x.to(wide), t.to(wide), y, **options)
            assert torch.equal(loss, expected) and loss.dtype == expected.dtype
            ours, theirs = (torch.autograd.grad(r, x)[0] for r in (loss, expected))
            assert torch.equal(ours, theirs) and ours.dtype == dtypes[0]

    def test_nan_propagates(self, device):
        for options in self.choices:
            x, t, _ = self.make((4, 40), torch.float32, device, options)
            with torch.no_grad():
                x[1, 3] = t[2, 5] = math.nan
            loss = self.op(x, t, None, reduction="none", **options)
            assert loss.isnan().nonzero().tolist() == [[1, 3], [2, 5]]

    # ---- Layouts

    @pairwise(
        layout=LAYOUTS, other=["contiguous", "part of wider rows", "transposed, dense"], labels=[None, torch.int64]
    )
    def test_layouts(self, layout, other, labels, device):
        x, t, y = self.make((3, 5, 64), torch.bfloat16, device, labels=labels)
        for a, b in ((layout, other), (other, layout)):
            inputs = LAYOUTS[a](x.detach()).requires_grad_(), LAYOUTS[b](t), y
            for reduction in ("batchmean", "none"):
                self.check(inputs, device, reduction=reduction, **self.choices[0])
        if y is not None:
            self.check((x, t, y.t().contiguous().t()), device, **self.choices[0])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_upstream_layouts(self, layout, device):
        x, t, y = self.make((3, 5, 64), torch.float32, device, labels=torch.int64)
        grad = LAYOUTS[layout](torch.randn(3, 5, 64, device=device))
        formula = operators()[self.name].reference
        results = [torch.autograd.grad(f(x, t, y, reduction="none"), x, grad)[0] for f in (self.op, formula)]
        torch.testing.assert_close(*results)

    # ---- Memory

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.library
    def test_the_gradient_overwrites_an_unreferenced_target(self, held, device):
        for options in self.choices:
            x, target, y = self.make((4, 64), torch.float32, device, options, torch.int64)
            (expected,) = torch.autograd.grad(self.op(x, target, y, **options), x)
            temporary = target * 1
            address, kept = temporary.data_ptr(), temporary if held else None
            loss = self.op(x * 1, temporary, y, **options)
            del temporary
            seen = []
            loss.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
            (got,) = torch.autograd.grad(loss, x)
            assert torch.equal(got, expected) and (seen == [address]) == (not held)
            assert kept is None or torch.equal(kept, target)

    # ---- Autograd and transforms

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_gradcheck(self, reduction):
        for options in self.choices:
            x, t, y = self.make((4, 5), torch.float64, "cpu", options, torch.int64)
            assert torch.autograd.gradcheck(lambda u: self.op(u, t, y, reduction=reduction, **options), [x])

    # ---- Bad input

    @pytest.mark.library
    def test_errors(self):
        x, y = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
        cases = {
            "input must be float32, float16, bfloat16 or float64": (x.long(), x.long()),
            "input must have at least one dimension": (torch.tensor(1.0), torch.tensor(1.0)),
            "input must be a dense, unquantized tensor": (x.to_sparse(), x),
            "target must have the dtype of input": (x, x.long()),
            r"target must have the shape of input, \[2, 8\]": (x, x[:1]),
            "target must be on cpu like input": (x, x.to("meta")),
            "target must be a dense, unquantized tensor": (x, x.to_sparse()),
            "target must not require a gradient": (x, x.clone().requires_grad_()),
            "shift_labels must be int64 or int32": (x, x, y.float()),
            r"shift_labels must have shape \[2\], that of input without its last dimension": (x, x, y[:1]),
            "shift_labels must be on cpu like input": (x, x, y.to("meta")),
            "reduction must be 'mean', 'batchmean', 'sum' or 'none'": (x, x, y, dict(reduction="avg")),
        }
        for message, arguments in cases.items():
            options = arguments[-1] if isinstance(arguments[-1], dict) else {}
            with pytest.raises(RuntimeError, match=rf"^{self.name}: {message}.*\(got "):
                self.op(*(a for a in arguments if not isinstance(a, dict)), **options)

    # ---- GPU only

    @pytest.mark.gpu
    @pairwise(dtype=CPU_DTYPES, n=[50257, 128256], labels=[None, torch.int64])
    def test_vocabularies(self, dtype, n, labels):
        for options in self.choices:
            inputs = self.make((333, n), dtype, "cuda", options, labels)
            self.check(inputs, "cuda", **options)

    @pytest.mark.gpu
    def test_more_than_2_to_the_31_elements(self):
        n, rows = 128256, 2**31 // 128256 + 5
        x = torch.rand(rows, n, device="cuda", dtype=torch.bfloat16).neg_()
        t = x.roll(1, -1)
        y = torch.zeros(rows, dtype=torch.long, device="cuda")
        y[:-7] = -100
        tail = [v[-7:].clone() for v in (x, t)]
        x.requires_grad_(), tail[0].requires_grad_()
        loss, expected = self.op(x, t, y, reduction="sum"), self.op(*tail, reduction="sum")
        torch.testing.assert_close(loss, expected)
        slopes = (torch.autograd.grad(r, v)[0][-7:] for r, v in ((loss, x), (expected, tail[0])))
        assert torch.equal(*slopes)

    @pytest.mark.gpu
    def test_no_memory_beyond_the_gradient(self):
        x, t, _ = self.make((512, 32000), torch.bfloat16, "cuda")
        target = [t * 1]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(self.op(x, target.pop(), None), x)
        assert torch.cuda.max_memory_allocated() - before < 2**18
