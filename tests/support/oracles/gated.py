"""Tests of out = act(gate) * up, shared by swiglu and geglu. Each activation is a subclass of GatedTests.

A subclass defines `op`, `packed`, `linear`, `stem` and the plain formula `reference(gate, up, **options)`. `choices`
lists the option values to test.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.checks import CPU_DTYPES, RecordAddress, assert_no_worse, check_op, equal, path_taken
from tests.support.pairs import sizes_by_device

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

    @sizes_by_device(cpu=[1, 130], cuda=[1, 64, 130, 1000, 2048, 8200], dtype=CPU_DTYPES)
    def test_linear_sizes(self, n, dtype, device):
        gate, up, _ = make((3, n), dtype, device)
        weight, bias, grad = parameters_of_linear(n, (3,), dtype, device)
        for ours, reference in self.each_linear():
            check_op(ours, reference, [gate, up, weight, bias], [grad], device)
            check_op(ours, reference, [gate, up, weight], [grad], device)

    @pytest.mark.parametrize("shape", [(1, 48), (0, 48)])
    @pytest.mark.library
    def test_linear_of_temporaries_with_strides_that_mean_nothing(self, shape, device):
        """Copies of halves keep the strides of one row."""
        leaves = make(shape, torch.float32, device)[:2]
        weight, bias, grad = parameters_of_linear(48, shape[:-1], torch.float32, device)
        learned = [*leaves, weight, bias]
        expected = torch.autograd.grad(self.linear(*learned), learned, grad)
        out = self.linear(*(half.clone() for half in torch.cat(leaves, -1).chunk(2, -1)), weight, bias)
        assert equal(torch.autograd.grad(out, learned, grad), expected)

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

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.parametrize("form", ["op", "packed", "linear"])
    @pytest.mark.library
    def test_backward_overwrites_unreferenced_inputs(self, form, held, device):
        leaves, parameters, grad = [*make((4, 256), torch.float32, device)[:2]], [], torch.randn(4, 256, device=device)
        if form == "packed":
            leaves = [torch.randn(4, 512, device=device, requires_grad=True)]
        if form == "linear":
            *parameters, grad = parameters_of_linear(256, (4,), torch.float32, device)
        op, learned, seen = getattr(self, form), [*leaves, *parameters], []
        expected = torch.autograd.grad(op(*learned), learned, grad)
        inputs = [RecordAddress.apply(t, seen) for t in leaves]
        addresses, held_inputs = {t.data_ptr() for t in inputs}, inputs if held else []
        out = op(*inputs, *parameters)
        del inputs
        assert equal(torch.autograd.grad(out, learned, grad), expected)
        assert (set(seen) == addresses) != held
        assert all(torch.equal(a, b) for a, b in zip(held_inputs, leaves))

    def test_a_saved_input_shared_with_another_op_is_not_overwritten(self, device):
        leaf = torch.randn(4, 64, device=device, requires_grad=True)
        x = RecordAddress.apply(leaf, [])
        total = self.op(x, x) + x.exp() * x.sin()
        del x
        expected = leaf.detach().requires_grad_()
        reference = self.op(expected, expected) + expected.exp() * expected.sin()
        pair = (torch.autograd.grad(o.sum(), i)[0] for o, i in ((total, leaf), (reference, expected)))
        assert torch.equal(*pair)

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
        "integers": (torch.ones(2, 8, dtype=torch.long), None, "gate must be float32, float16, bfloat16 or float64"),
        "another width": (torch.ones(2, 8), torch.ones(2, 7), r"up must have the shape of gate, \[2, 8\]"),
        "broadcast": (torch.ones(2, 8), torch.ones(8), r"up must have the shape of gate, \[2, 8\]"),
        "another dtype": (torch.ones(2, 8), torch.ones(2, 8).half(), "up must have the dtype of gate, Float"),
        "elsewhere": (torch.ones(2, 8), torch.ones(2, 8, device="meta"), "up must be on cpu like gate"),
    }

    @pytest.mark.parametrize("case", ERRORS)
    @pytest.mark.library
    def test_errors(self, case):
        gate, up, message = self.ERRORS[case]
        with pytest.raises(RuntimeError, match=f"{self.stem}: {message}.*got "):
            self.op(gate, gate if up is None else up)

    @pytest.mark.library
    def test_packed_errors(self):
        with pytest.raises(RuntimeError, match=f"{self.stem}_packed: gate_up must have an even last dimension .got 7"):
            self.packed(torch.ones(2, 7))

    LINEAR_ERRORS = {
        "another width": (lambda w: w[:, 1:], None, r"weight must have shape \[features, 8\]"),
        "one dimension": (lambda w: w[0], None, r"weight must have shape \[features, 8\]"),
        "another dtype": (lambda w: w.half(), None, "weight must have the dtype of gate, Float"),
        "length of bias": (lambda w: w, torch.ones(4), r"bias must have shape \[3\], one value per feature"),
        "dtype of bias": (lambda w: w, torch.ones(3).half(), "bias must have the dtype of gate, Float"),
    }

    @pytest.mark.parametrize("case", LINEAR_ERRORS)
    @pytest.mark.library
    def test_linear_errors(self, case):
        change, bias, message = self.LINEAR_ERRORS[case]
        with pytest.raises(RuntimeError, match=f"{self.stem}_linear: {message}.*got "):
            self.linear(torch.ones(2, 8), torch.ones(2, 8), change(torch.ones(3, 8)), bias)
