"""Calls random operators with random shapes, options and dtypes, forward and backward, and measures memory as it goes.

python tests/soak.py [--steps N] [--device cpu|cuda] [--seed N]

Every hundredth call is compared with its formula in fp64. The exit status is 1 if a result is wrong, or if memory of the host or of
the device grows from the second quarter of the steps to the last. The calls repeat after 2000, and CUDA kernels are loaded
before the first: torch, its libraries and the driver keep something for each shape and each kernel that they meet.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import liger_ops
from liger_ops._accuracy import gradients
from liger_ops.doctor.operators import DTYPES, Comparison, public_operators
from liger_ops.reference import Operator, _calls

MEASUREMENTS = 80
COMPARED = 100
REPEATED = 2000
# What a leak of one page per step makes of 1000 steps. Freed memory that malloc keeps varies by less.
GROWTH = 4 << 20


def random_call(operator: Operator, chance: random.Random) -> dict[str, Any]:
    # Larger than those that hypothesis draws (strategies.py): memory is measured.
    def size_of(letter: str) -> int:
        if letter == "R":  # rotated columns, or half of them, of a head of D
            return 2 * chance.randint(1, 4)
        if letter == "D":
            return 2 * chance.randint(8, 48)
        if letter in "KW":
            return chance.randint(2, 2 if letter == "K" else 8)
        # The loss over one class is zero, of which no error is a part.
        if letter in "nmVI":
            return chance.choice((8, 17, 64, 100, 257, 1024) if letter == "V" else (1, 8, 17, 64, 100, 257, 1024))
        return chance.randint(1, 40)

    _, given, values = chance.choice(list(_calls.choices(operator)))
    values |= {"sizes": [chance.randint(1, 40) for _ in range(4)]} if "sizes" in operator.types else {}
    values |= {"top_k": 1} if "top_k" in operator.types else {}
    leading = [chance.randint(0, 9) for _ in range(chance.randint(0, 3))]
    return _calls.call(operator, given, values, size_of, leading, chance.randrange(1 << 30))


def step(operator: Operator, chance: random.Random, device: str, compare: bool) -> list[str]:
    """What is wrong."""
    comparison = Comparison(operator, random_call(operator, chance), chance.choice(DTYPES), device)
    if compare:
        return [f"{operator.__name__}: {name}: {wrong}" for name, _, wrong in comparison.run() if wrong]
    function = comparison.function(getattr(torch.ops.liger, operator.__name__))
    generator = torch.Generator(device).manual_seed(0)
    found = function(*(t.detach() for t in comparison.tensors))
    upstream = [torch.randn(t.shape, generator=generator, device=device) for t in found]
    gradients(function, comparison.tensors, upstream)
    return []


def memory(device: str) -> tuple[int, int]:
    """Bytes of the host, without what malloc keeps for later, and of the device."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, torch.cuda.memory_allocated() if device == "cuda" else 0


def growth(measured: list[int]) -> int:
    """From the second quarter to the last, of medians."""
    quarter = max(len(measured) // 4, 1)
    return int(statistics.median(measured[-quarter:]) - statistics.median(measured[quarter : 2 * quarter]))


def soak(
    steps: int, device: str, seed: int = 0, each: Callable[[int], None] = lambda number: None
) -> tuple[list[str], tuple[int, int]]:
    """What is wrong, and the growth of the memory of host and device. each: called with the number of each step."""
    if device == "cuda":
        liger_ops.preload()
    chance, chosen = random.Random(seed), public_operators()
    wrong: list[str] = []
    measured = []
    gc.freeze()  # collections then examine only what is made from here on
    try:
        for number in range(steps):
            if number % REPEATED == 0:
                chance.seed(seed)
            wrong += step(chance.choice(chosen), chance, device, number % COMPARED == 0)
            each(number)
            if number % max(steps // MEASUREMENTS, 1) == 0:
                measured.append(memory(device))
    finally:
        gc.unfreeze()
    host, on_device = (growth(list(series)) for series in zip(*measured))
    return wrong, (host, on_device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.monotonic()
    wrong, (host, device) = soak(given.steps, given.device, given.seed)
    compared = len(range(0, given.steps, COMPARED))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(
        f"{given.steps} steps on {given.device} in {time.monotonic() - start:.0f} s, {compared} of them compared: "
        f"{len(wrong)} wrong results; memory grew by {host / 2**20:.1f} MiB on the host, {device / 2**20:.1f} MiB on the device"
    )
    sys.exit(bool(wrong) or max(host, device) > GROWTH)


if __name__ == "__main__":
    main()
