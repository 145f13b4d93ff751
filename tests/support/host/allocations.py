"""Memory that a step allocates on the CPU, without the scratch memory of GEMM libraries: it depends on the CPU and the
number of threads, and an operator cannot limit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def allocations(step: Callable[[], Any]) -> Iterator[int]:
    """Bytes of each allocation, and of each release as a negative number, in their order. The profiler sees those inside
    of operators too. Of a GEMM only its result counts, if that is a new tensor."""
    step()  # what the first call allocates for good
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    inside: dict[int, tuple[int, int]] = {}  # of each thread: the end of its GEMM, and the bytes that it holds by now
    for event in sorted(found.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        thread, now = event.start_thread_id(), event.start_ns()
        end, held = inside.get(thread, (0, 0))
        if held and now > end:
            yield held
            inside[thread] = end, held = 0, 0
        if event.name() in GEMMS and now > end:
            inside[thread] = event.end_ns(), 0
        elif event.name() == "[memory]" and now <= end:
            inside[thread] = end, held + event.nbytes()
        elif event.name() == "[memory]":
            yield event.nbytes()
    yield from (held for _, held in inside.values() if held)


def peak_memory(step: Callable[[], Any]) -> int:
    """Most bytes that the step holds at any time."""
    now = peak = 0
    for change in allocations(step):
        now += change
        peak = max(peak, now)
    return peak


def largest_allocation(step: Callable[[], Any]) -> int:
    """Bytes."""
    return max(allocations(step))
