"""Clocks: events around a call on CUDA, the host's clock on CPU. Also the copy bandwidth and GEMM rate of a machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARMUP_CALLS = 3
MIN_SAMPLES, MAX_SAMPLES = 3, 20  # by provider, pass and round
FLUSH_BYTES = 256 << 20
MIB = 1 << 20

Record = dict[str, Any]

# As many flushes take longer than the host part of a call: half a millisecond on an H200.
COVER = 8


class CudaClock:
    device = "cuda"
    ceiling_bytes = 2 << 30
    seconds_a_round = 0.01
    host_batch = 50  # the queue of the driver holds about a thousand launches

    def __init__(self, flushes: int = 1) -> None:
        self.flushes = flushes
        self.flush = torch.empty(max(FLUSH_BYTES, 4 * self.properties().L2_cache_size), dtype=torch.int8, device="cuda")

    def properties(self) -> Any:
        return torch.cuda.get_device_properties(torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def samples(self, prepare: Callable[[], Any], call: Callable[[Any], Any], count: int) -> list[float]:
        """Microseconds of each of `count` calls."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            state = prepare()
            for _ in range(self.flushes):
                self.flush.zero_()
            start.record()
            result = call(state)
            end.record()
            del result, state
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def peak_bytes(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> int:
        state = prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call(state)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result, state
        return peak

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class CpuClock:
    device = "cpu"
    ceiling_bytes = 256 << 20
    seconds_a_round = 0.03
    host_batch = 200

    def synchronize(self) -> None:
        pass

    def samples(self, prepare: Callable[[], Any], call: Callable[[Any], Any], count: int) -> list[float]:
        out = []
        for _ in range(count):
            state = prepare()
            start = time.perf_counter_ns()
            result = call(state)
            out.append((time.perf_counter_ns() - start) / 1e3)
            del result, state
        return out

    def peak_bytes(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> int:
        """The CPU allocator records no peak, so the allocations in a profile are added up."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            # Inside the profile: it knows the size of a freed block only if it saw the allocation.
            state = prepare()
            with torch.profiler.record_function("measured"):
                result = call(state)
            del result, state
        level = before = peak = 0
        started = False
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "measured":
                started, before = True, level
            elif event.name() == "[memory]":
                level += event.nbytes()
                peak = max(peak, level - before) if started else 0
        return peak

    def release(self) -> None:
        gc.collect()


Clock = CudaClock | CpuClock


def measure_copies(clock: Clock) -> Record:
    """The times of copies of several sizes, including the launch: a realistic goal for kernels that move as many bytes."""
    source = torch.randn(clock.ceiling_bytes // 4, device=clock.device)
    target = torch.empty_like(source)
    found, count = [], len(source)
    while 4 * count >= 32 * MIB:
        here, there = source[:count], target[:count]
        clock.samples(lambda: None, lambda _: there.copy_(here), WARMUP_CALLS)
        times = clock.samples(lambda: None, lambda _: there.copy_(here), MAX_SAMPLES)
        found.insert(0, [8 * count, statistics.median(times)])
        count //= 2
    clock.release()
    return {"kind": "copies", "us": found}


def fastest_copy(clock: Clock) -> float:
    source = torch.randn(clock.ceiling_bytes // 4, device=clock.device)
    target = torch.empty_like(source)
    clock.samples(lambda: None, lambda _: target.copy_(source), WARMUP_CALLS)
    return min(clock.samples(lambda: None, lambda _: target.copy_(source), MAX_SAMPLES))


def measure_ceilings(clock: Clock, with_matmul: bool) -> Record:
    """Bytes per second of a large copy and operations per second of a large GEMM, now, on this machine."""
    record: Record = {"kind": "ceiling", "copy_gb_s": 2 * clock.ceiling_bytes / fastest_copy(clock) / 1e3}
    if with_matmul:
        # Many CPUs have no instructions for bf16, and the quick suite is in fp32 there.
        size, dtype = (8192, torch.bfloat16) if clock.device == "cuda" else (1024, torch.float32)
        record["matmul_dtype"] = str(dtype).removeprefix("torch.")
        a, b = (torch.randn(size, size, device=clock.device, dtype=dtype) for _ in range(2))
        clock.samples(lambda: None, lambda _: a @ b, WARMUP_CALLS)
        record["matmul_tflop_s"] = 2 * size**3 / min(clock.samples(lambda: None, lambda _: a @ b, MAX_SAMPLES)) / 1e6
    clock.release()
    return record
