"""Arguments of moe_experts and moe_experts_sorted for tests."""

import torch
from torch import Tensor

from tests.support.calls import GPT_OSS

# Every product of theirs takes PyTorch's grouped GEMM.
MANY_ROWS = [(2100, 264, 1032, 4, 2), (1111, 128, 1024, 5, 8)]
EVERY_OPTION = [
    dict(),
    dict(interleaved=True),
    dict(transposed=True),
    GPT_OSS,
    dict(activation="gelu"),
    dict(activation="gelu_tanh", transposed=True),
    dict(limit=0.5, interleaved=True),
    dict(alpha=1.5, up_offset=0.25),
    dict(weight_before=True),
    dict(weight_before=True, activation="gelu", interleaved=True, transposed=True),
]


def weights(hidden, inner, experts, transposed, make, bias=False) -> list[Tensor]:
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    shapes = [(e, b, a) if transposed else (e, a, b) for e, a, b in shapes]
    scaled = [make(*shape) * max(shape[1 if transposed else 2], 1) ** -0.5 for shape in shapes]
    return scaled + ([make(experts, 2 * inner), make(experts, hidden)] if bias else [])


def inputs_of(
    tokens, hidden, inner, experts, choices, dtype=torch.float32, device="cpu", transposed=False, bias=False, index=None
) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments in call order, of which all floating-point ones require a gradient, and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, (gate_up, down, *biases) = make(tokens, hidden), weights(hidden, inner, experts, transposed, make, bias)
    if index is None:  # skewed: the first experts get most, some none; a few are dropped
        index = (torch.rand(tokens, choices, generator=generator) ** 3 * (experts + 1)).long() - int(experts > 1)
    weight = torch.rand(tokens, choices, generator=generator)
    made = [x, gate_up, down, index, weight, *biases]
    made = [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in made]
    return [t.requires_grad_(t.is_floating_point()) for t in made], [make(tokens, hidden).to(device, dtype)]


def sorted_inputs(rows, hidden, inner, counts, dtype=torch.float32, device="cpu", transposed=False, bias=False):
    (x, gate_up, down, _, _, *biases), grads = inputs_of(
        rows, hidden, inner, len(counts), 1, dtype, device, transposed, bias
    )
    return [x, gate_up, down, torch.tensor(counts, device=device), *biases], grads


def with_options(function, **options):
    return lambda *tensors: function(*tensors, **options)
