"""Tests of out = act(gate) * up, shared by swiglu and geglu. Each activation is a subclass of GatedTests.

A subclass defines `op`, `packed`, `linear`, `stem` and the plain formula `reference(gate, up, **options)`. `choices`
lists the option values to test.
"""

import itertools

import pytest
import torch
from checks import (
    CPU_DTYPES,
    assert_no_worse,
    check_op,
    path_taken,
)
from pairs import either_or_both, sizes_by_device
from torch import Tensor
from torch.nn import functional as F

# Widths on both sides of every tile boundary in the variant table and of the CPU loop lengths (512 and 8192), model
# widths that are not powers of two, and odd widths that no vector length divides.
SIZES = [1, 7, 33, 64, 72, 130, 256, 264, 512, 520, 1000, 1024, 1032, 2048, 5504, 8192, 8200, 14336, 40001]
# Below and above both loop lengths.
CPU_SIZES = [1, 33, 520, 8200]


def make(shape, dtype, device):
    gate, up = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    return gate, up, torch.randn(shape, dtype=dtype, device=device)


def parameters_of_linear(n, rows, dtype, device):
    """weight: (24, n), bias: (24,), and the gradient of the layer's output: (*rows, 24)."""
    weight = (torch.randn(24, n, dtype=dtype, device=device) / n**0.5).requires_grad_()
    bias = torch.randn(24, dtype=dtype, device=device, requires_grad=True)
    return weight, bias, torch.randn(*rows, 24, dtype=dtype, device=device)


LAYOUTS = {
    "contiguous": lambda x: x,
    "half of a fused projection": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "other half of a fused projection": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "without the last position": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "half, without the last position": lambda x: torch.cat([torch.cat([x, x[:, :1]], 1)] * 2, -1)[
        :, :-1, : x.shape[-1]
    ],
    "transposed, dense": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided last dimension": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "misaligned": lambda x: torch.cat([x.flatten(), x.new_zeros(1)]).roll(1)[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x),
}


class Probe(torch.autograd.Function):
    """Copies x into a tensor that only its consumer references, and records the address of its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, seen: list) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.seen.append(gradient.data_ptr())
        return gradient, None


def halves(gate_up: Tensor) -> tuple[Tensor, ...]:
    return gate_up.chunk(2, -1)


class GatedTests:
    op: torch._ops.OpOverloadPacket
    packed: torch._ops.OpOverloadPacket
    linear: torch._ops.OpOverloadPacket
    stem: str
    choices: list[dict]

    @staticmethod
    def reference(gate: Tensor, up: Tensor, **options) -> Tensor:
        raise NotImplementedError

    def packed_reference(self, gate_up: Tensor, **options) -> Tensor:
        return self.reference(*halves(gate_up), **options)

    def each(self):
        """(op, reference) for each combination of options."""
        for options in self.choices:
            yield (lambda *t: self.op(*t, **options)), (lambda *t: self.reference(*t, **options))

    def each_packed(self):
        for options in self.choices:
            yield (lambda t: self.packed(t, **options)), (lambda t: self.packed_reference(t, **options))

    def each_linear(self):
        for options in self.choices:
            yield (
                lambda gate, up, *parameters: self.linear(gate, up, *parameters, **options),
                lambda gate, up, *parameters: F.linear(self.reference(gate, up, **options), *parameters),
            )

    @sizes_by_device(cpu=CPU_SIZES, cuda=SIZES, dtype=CPU_DTYPES)
    def test_sizes(self, n, dtype, device):
        gate, up, grad = make((3, n), dtype, device)
        for ours, reference in self.each():
            check_op(ours, reference, [gate, up], [grad], device)

    @sizes_by_device(cpu=CPU_SIZES, cuda=SIZES, dtype=CPU_DTYPES)
    def test_packed_sizes(self, n, dtype, device):
        gate_up = torch.randn(3, 2 * n, dtype=dtype, device=device, requires_grad=True)
        grad = torch.randn(3, n, dtype=dtype, device=device)
        for ours, reference in self.each_packed():
            check_op(ours, reference, [gate_up], [grad], device)

    @pytest.mark.parametrize("layouts", either_or_both(LAYOUTS), ids=", ".join)
    def test_layouts(self, layouts, device):
        gate, up, grad = make((3, 5, 64), torch.bfloat16, device)
        gate, up = (LAYOUTS[k](t.detach()).requires_grad_() for k, t in zip(layouts, (gate, up)))
        for ours, reference in self.each():
            check_op(ours, reference, [gate, up], [LAYOUTS[layouts[0]](grad)], device)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_packed_layouts(self, layout, device):
        gate_up, _, _ = make((3, 5, 128), torch.bfloat16, device)
        gate_up = LAYOUTS[layout](gate_up.detach()).requires_grad_()
        grad = LAYOUTS[layout](torch.randn(3, 5, 64, dtype=torch.bfloat16, device=device))
        for ours, reference in self.each_packed():
            check_op(ours, reference, [gate_up], [grad], device)

    @sizes_by_device(cpu=[1, 130], cuda=[1, 64, 130, 1000, 2048, 8200], dtype=CPU_DTYPES)
    def test_linear_sizes(self, n, dtype, device):
        gate, up, _ = make((3, n), dtype, device)
        weight, bias, grad = parameters_of_linear(n, (3,), dtype, device)
        for ours, reference in self.each_linear():
            check_op(ours, reference, [gate, up, weight, bias], [grad], device)
            check_op(ours, reference, [gate, up, weight], [grad], device)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_linear_layouts(self, layout, device):
        gate, up, _ = make((3, 5, 64), torch.bfloat16, device)
        gate, up = (LAYOUTS[layout](t.detach()).requires_grad_() for t in (gate, up))
        weight, bias, grad = parameters_of_linear(64, (3, 5), torch.bfloat16, device)
        for transposed in (False, True):
            w = weight.detach().t().contiguous().t().requires_grad_() if transposed else weight
            for ours, reference in self.each_linear():
                check_op(ours, reference, [gate, up, w, bias], [LAYOUTS[layout](grad)], device)

    @pytest.mark.parametrize("shape", [(1, 48), (1, 3, 48), (3, 1, 48), (0, 48)])
    @pytest.mark.library
    def test_linear_of_temporaries_with_strides_that_mean_nothing(self, shape, device):
        """Copies of halves keep the strides of one row."""
        leaves = make(shape, torch.float32, device)[:2]
        weight, bias, grad = parameters_of_linear(48, shape[:-1], torch.float32, device)
        learned = [*leaves, weight, bias]
        expected = torch.autograd.grad(self.linear(*learned), learned, grad)
        gate, up = torch.cat(leaves, -1).chunk(2, -1)
        gate, up = gate.clone(), up.clone()
        out = self.linear(gate, up, weight, bias)
        del gate, up
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, learned, grad), expected))

    def test_linear_computes_only_required_gradients(self, device):
        gate, up, _ = make((6, 160), torch.float32, device)
        weight, bias, grad = parameters_of_linear(160, (6,), torch.float32, device)
        for ours, reference in self.each_linear():
            for learned in itertools.product((True, False), repeat=4):
                inputs = [t if wanted else t.detach() for t, wanted in zip((gate, up, weight, bias), learned)]
                check_op(ours, reference, inputs, [grad], device)

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.library
    def test_linear_backward_overwrites_unreferenced_inputs(self, held, device):
        leaves = make((4, 256), torch.float32, device)[:2]
        weight, bias, grad = parameters_of_linear(256, (4,), torch.float32, device)
        learned = [*leaves, weight, bias]
        expected = torch.autograd.grad(self.linear(*learned), learned, grad)
        seen: list[int] = []
        gate, up = (Probe.apply(t, seen) for t in leaves)
        addresses, values = {gate.data_ptr(), up.data_ptr()}, [gate.detach().clone(), up.detach().clone()]
        out = self.linear(gate, up, weight, bias)
        held_inputs = [gate, up] if held else []
        del gate, up
        got = torch.autograd.grad(out, learned, grad)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        assert (set(seen) == addresses) != held
        assert all(torch.equal(a, b) for a, b in zip(held_inputs, values))

    @pytest.mark.library
    def test_linear_saves_its_inputs_only(self, device):
        gate, up, _ = make((4, 64), torch.float32, device)
        weight, bias, _ = parameters_of_linear(64, (4,), torch.float32, device)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            self.linear(gate, up, weight, bias)
        assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (gate, up, weight)]

    def test_packed_equals_the_op_on_both_halves(self, device):
        for n in (24, 96, 200, 1000, 2048, 3000, 8200):
            gate_up = torch.randn(4, 2 * n, device=device, requires_grad=True)
            grad = torch.randn(4, n, device=device)
            out, packed = self.op(*halves(gate_up)), self.packed(gate_up)
            assert torch.equal(out, packed)
            assert torch.equal(*(torch.autograd.grad(o, gate_up, grad)[0] for o in (out, packed)))

    def test_dense_strides_are_preserved(self, device):
        gate, up, grad = (t.detach().transpose(0, 1).requires_grad_() for t in make((5, 3, 8), torch.float32, device))
        out = self.op(gate, up)
        assert out.stride() == gate.stride()
        assert all(g.stride() == gate.stride() for g in torch.autograd.grad(out, [gate, up], grad))

    def test_nan_and_infinity_propagate(self, device):
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0, -80.0, 80.0], device=device)
        gate, up = (t.reshape(-1).contiguous() for t in torch.meshgrid(special, special, indexing="ij"))
        for ours, reference in self.each():
            # In fp64: eager's vectorized gelu(inf) is NaN on some CPUs.
            expected = reference(gate.double(), up.double()).float()
            # The relative error of exp(-80) is the error of its argument.
            fp32 = torch.finfo(torch.float32)
            torch.testing.assert_close(ours(gate, up), expected, equal_nan=True, atol=fp32.tiny, rtol=80 * fp32.eps)

    def test_only_required_gradients(self, device):
        gate, up, grad = make((6, 160), torch.float32, device)
        for ours, reference in self.each():
            for inputs in ([gate.detach(), up], [gate, up.detach()], [gate.detach(), up.detach()]):
                check_op(ours, reference, inputs, [grad], device)

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.library
    def test_backward_overwrites_unreferenced_inputs(self, held, device):
        leaves = make((4, 256), torch.float32, device)
        expected = torch.autograd.grad(self.op(*leaves[:2]), leaves[:2], leaves[2])
        seen: list[int] = []
        gate, up = (Probe.apply(t, seen) for t in leaves[:2])
        addresses, values = {gate.data_ptr(), up.data_ptr()}, [gate.detach().clone(), up.detach().clone()]
        out = self.op(gate, up)
        held_inputs = [gate, up] if held else []
        del gate, up
        got = torch.autograd.grad(out, leaves[:2], leaves[2])
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        assert (set(seen) == addresses) != held
        assert all(torch.equal(a, b) for a, b in zip(held_inputs, values))

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.library
    def test_packed_backward_overwrites_an_unreferenced_input(self, held, device):
        leaf = torch.randn(4, 512, device=device, requires_grad=True)
        grad = torch.randn(4, 256, device=device)
        (expected,) = torch.autograd.grad(self.packed(leaf), leaf, grad)
        seen: list[int] = []
        gate_up = Probe.apply(leaf, seen)
        addresses, held_input = [gate_up.data_ptr()], gate_up if held else None
        out = self.packed(gate_up)
        del gate_up
        assert torch.equal(torch.autograd.grad(out, leaf, grad)[0], expected)
        assert (seen == addresses) != held
        assert held_input is None or torch.equal(held_input, leaf)

    def test_a_saved_input_shared_with_another_op_is_not_overwritten(self, device):
        leaf = torch.randn(4, 64, device=device, requires_grad=True)
        x = Probe.apply(leaf, [])
        total = self.op(x, x) + x.exp() * x.sin()
        del x
        expected = leaf.detach().requires_grad_()
        reference = self.op(expected, expected) + expected.exp() * expected.sin()
        pair = (torch.autograd.grad(o.sum(), i)[0] for o, i in ((total, leaf), (reference, expected)))
        assert torch.equal(*pair)

    def test_gradcheck(self):
        gate, up, _ = make((3, 5), torch.float64, "cpu")
        gate_up = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
        for ours, _ in self.each():
            assert torch.autograd.gradcheck(ours, [gate, up])
        for ours, _ in self.each_packed():
            assert torch.autograd.gradcheck(ours, [gate_up])
        weight, bias, _ = parameters_of_linear(5, (3,), torch.float64, "cpu")
        for ours, _ in self.each_linear():
            assert torch.autograd.gradcheck(ours, [gate, up, weight, bias])

    def test_autocast_promotes_like_multiplication(self, device):
        gate, up, _ = make((4, 64), torch.bfloat16, device)
        with torch.autocast(device, torch.bfloat16):
            assert self.op(gate, up).dtype == self.packed(gate).dtype == torch.bfloat16
            for pair in ((gate, up.float()), (gate.float(), up)):
                assert self.op(*pair).dtype == self.reference(*pair).dtype == torch.float32

    @pytest.mark.gpu
    @pytest.mark.parametrize("shape", [(2**31 // 4096 + 5, 4096), (2**31 + 4096,)])
    def test_more_than_2_to_the_31_elements(self, shape):
        gate, up = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        with path_taken("cuda"):
            out = self.op(gate, up)
        tails = [t.flatten()[-10000:] for t in (out, gate, up)]
        gate_tail, up_tail = tails[1:]
        assert_no_worse(
            "tail", tails[0], self.reference(gate_tail, up_tail), self.reference(gate_tail.double(), up_tail.double())
        )
        if len(shape) == 2:
            packed = self.packed(gate)
            ours, last = packed[-7:], gate[-7:]
            assert_no_worse("packed", ours, self.packed_reference(last), self.packed_reference(last.double()))

    ERRORS = {
        "integers": (
            lambda: (torch.ones(2, 8, dtype=torch.long),) * 2,
            "gate must be float32, float16, bfloat16 or float64",
        ),
        "scalar": (lambda: (torch.tensor(1.0),) * 2, "gate must have at least one dimension"),
        "sparse gate": (lambda: (torch.eye(8).to_sparse(), torch.eye(8)), "gate must be a dense, unquantized tensor"),
        "sparse up": (lambda: (torch.eye(8), torch.eye(8).to_sparse()), "up must be a dense, unquantized tensor"),
        "another width": (lambda: (torch.ones(2, 8), torch.ones(2, 7)), r"up must have the shape of gate, \[2, 8\]"),
        "broadcast": (lambda: (torch.ones(2, 8), torch.ones(8)), r"up must have the shape of gate, \[2, 8\]"),
        "another dtype": (lambda: (torch.ones(2, 8), torch.ones(2, 8).half()), "up must have the dtype of gate, Float"),
        "elsewhere": (lambda: (torch.ones(2, 8), torch.ones(2, 8, device="meta")), "up must be on cpu like gate"),
    }

    @pytest.mark.parametrize("case", ERRORS)
    @pytest.mark.library
    def test_errors(self, case):
        arguments, message = self.ERRORS[case]
        with pytest.raises(RuntimeError, match=f"{self.stem}: {message}.*got "):
            self.op(*arguments())

    @pytest.mark.library
    def test_packed_errors(self):
        with pytest.raises(RuntimeError, match=f"{self.stem}_packed: gate_up must have an even last dimension .got 7"):
            self.packed(torch.ones(2, 7))
        with pytest.raises(
            RuntimeError, match=f"{self.stem}_packed: gate_up must be float32, float16, bfloat16 or float64"
        ):
            self.packed(torch.ones(2, 8, dtype=torch.long))

    LINEAR_ERRORS = {
        "another width": (lambda w: w[:, 1:], None, r"weight must have shape \[features, 8\]"),
        "one dimension": (lambda w: w[0], None, r"weight must have shape \[features, 8\]"),
        "another dtype": (lambda w: w.half(), None, "weight must have the dtype of gate, Float"),
        "elsewhere": (lambda w: w.to("meta"), None, "weight must be on cpu like gate"),
        "sparse": (lambda w: w.to_sparse(), None, "weight must be a dense, unquantized tensor"),
        "length of bias": (lambda w: w, torch.ones(4), r"bias must have shape \[3\], one value per feature"),
        "dtype of bias": (lambda w: w, torch.ones(3).half(), "bias must have the dtype of gate, Float"),
        "sparse bias": (lambda w: w, torch.ones(3).to_sparse(), "bias must be a dense, unquantized tensor"),
    }

    @pytest.mark.parametrize("case", LINEAR_ERRORS)
    @pytest.mark.library
    def test_linear_errors(self, case):
        change, bias, message = self.LINEAR_ERRORS[case]
        with pytest.raises(RuntimeError, match=f"{self.stem}_linear: {message}.*got "):
            self.linear(torch.ones(2, 8), torch.ones(2, 8), change(torch.ones(3, 8)), bias)
