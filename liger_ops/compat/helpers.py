"""Helpers in `liger_kernel.ops` that other code calls: for its own Triton kernels, to route tokens, to pack weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .utils import infer_device

# Rows of a tile of the package's experts.
BLOCK_M_TOKEN = 64
LARGEST_BLOCK = 65536
# Least block size: number of warps.
WARPS = {32768: 32, 8192: 16, 2048: 8, 0: 4}
BITS = 2


def is_hip() -> bool:
    return torch.version.hip is not None


@contextmanager
def device_context(device: Any) -> Iterator[None]:
    """Makes the device current, if its type has a current device."""
    device = torch.device(device)
    guard = getattr(getattr(torch, device.type, None), "device", None)
    if guard is None:
        yield
    else:
        with guard(device):
            yield


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the function gets contiguous tensors."""

    def contiguous(value: Any) -> Any:
        return value.contiguous() if isinstance(value, Tensor) else value

    @functools.wraps(fn)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def calculate_settings(n: int) -> tuple[int, int]:
    """The block size and the number of warps for a row of n elements in one block."""
    block = 1 << max(0, n - 1).bit_length()
    if block > LARGEST_BLOCK:
        raise RuntimeError(f"calculate_settings: n must be at most {LARGEST_BLOCK} (got {n})")
    warps = next(number for least, number in WARPS.items() if block >= least)
    return block, min(warps, 16) if is_hip() else warps


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """operator: such as operator.ge. False if the package is missing."""
    from packaging.version import Version

    try:
        found = importlib.import_module(package)
    except ImportError:
        return False
    return operator(Version(found.__version__), Version(target))


def amp_custom_fwd(fwd: Any = None, **options: Any) -> Any:
    """A decorator for the forward of a function of autograd, for autocast on the device of this machine."""
    return torch.amp.custom_fwd(fwd, device_type=infer_device(), **options)


def amp_custom_bwd(bwd: Any = None, **options: Any) -> Any:
    return torch.amp.custom_bwd(bwd, device_type=infer_device(), **options)


def get_amp_custom_fwd_bwd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return amp_custom_fwd, amp_custom_bwd


def compute_routing_metadata(topk_indices: Tensor, E: int, block_m_token: int = BLOCK_M_TOKEN) -> tuple[Tensor, ...]:
    """Where the pairs of a token and one of its experts lie once they are sorted by expert, in int32.

    topk_indices: (T, K). Results: the number of pairs of each expert (E,); its first row (E + 1,); the token of each
    row (T K,); the pair of each row (T K,); the row of each pair (T K,); the first row and the expert of each tile of
    at most `block_m_token` rows of one expert.
    """
    pairs = topk_indices.flatten()
    counts = pairs.bincount(minlength=E)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    pair_of_row = pairs.argsort(stable=True)
    tiles = (counts + block_m_token - 1) // block_m_token
    expert_of_tile = torch.arange(E, device=pairs.device).repeat_interleave(tiles)
    first_tile = (tiles.cumsum(0) - tiles)[expert_of_tile]
    within = torch.arange(len(expert_of_tile), device=pairs.device) - first_tile
    results = (
        counts, starts, pair_of_row // topk_indices.shape[1], pair_of_row, pair_of_row.argsort(),
        starts[expert_of_tile] + within * block_m_token, expert_of_tile,
    )  # fmt: skip
    return tuple(t.to(torch.int32) for t in results)


# ---- Weights -1, 0 and 1 (and 2), four in a byte


def check_bits(bits: int) -> None:
    if bits != BITS:
        raise ValueError(f"mm_int8int2: bits must be {BITS} (got {bits})")


def pack_weights(intweights: Tensor, bits: int = BITS) -> Tensor:
    """intweights: (4 K, ...) or fewer rows, in -1 ... 2 -> (K, ...) uint8. Unlike the package's, it does not change its
    argument."""
    check_bits(bits)
    per_byte = 8 // bits
    rows = -(-len(intweights) // per_byte)
    unsigned = (intweights + 1).to(torch.uint8)
    missing = unsigned.new_zeros(rows * per_byte - len(unsigned), *unsigned.shape[1:])
    parts = torch.cat([unsigned, missing]).unflatten(0, (per_byte, rows))
    packed = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        packed |= part << bits * i
    return packed


def unpack_weights(packed: Tensor, bits: int = BITS) -> Tensor:
    """packed: (K, ...) uint8 -> (4 K, ...) int32."""
    check_bits(bits)
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.cat(parts).to(torch.int32) - 1


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a: (M, 4 K) int8, b: (K, N) packed weights -> (M, N) int32, without overflow."""
    if a.shape[1] != 4 * b.shape[0]:
        raise AssertionError(f"mm_int8int2: a must have {4 * b.shape[0]} columns (got {a.shape[1]})")
    # GPUs have no GEMM of integers in torch. Sums of int8 times 2 are exact in fp64.
    return (a.to(torch.float64) @ unpack_weights(b).to(torch.float64)).to(torch.int32)
