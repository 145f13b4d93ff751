"""csrc/runtime on a stub driver: launches from any thread, and their error messages."""

import re
import struct
import subprocess
from functools import cache
from itertools import islice

import pytest

import liger_ops.kernels as tables
from liger_ops.aot import pack
from liger_ops.aot.compile import cubin_parameters
from tests.support.host import stub_cuda
from tests.support.host.stub_cuda import LIBRARIES, PACKS, ROOT, compile_cpp, fnv, sample

KERNEL = "column_sum"
VARIANT = next(tables.find(KERNEL).variants()).name


def every_kernel():
    return {k.name: k for k in tables.kernels()}


# ---- Launches.


def launch_every_kernel():
    """Launches the first and last variant of each kernel, with arguments whose neighbouring bytes differ."""
    sent = []
    for kernel in tables().kernels():
        size = runtime.args_bytes(kernel.name)
        for variant in sorted({0, max(v.index for v in kernel.variants())}):
            args = bytes((7 * i + variant) % 251 for i in range(size))
            launch(kernel.name, variant, grid=(5, 6, 7), args=args, stream=0xABCDEF0123)
            sent.append([kernel.name, variant, args.hex()])
    return [sent, calls("cuLaunchKernel"), calls("cuModuleLoadData")]


@pytest.fixture(scope="module")
def launched():
    sent, launches, modules = stub_cuda.run(launch_every_kernel).value
    done = [c for c in launches if "symbol" in c]
    assert len(done) == len(modules) == len(sent) >= len(every_kernel())
    return list(zip(sent, done, modules))


def test_arguments_arrive_byte_for_byte(launched):
    for (name, _, args), call, _ in launched:
        assert call["args"] == args, name
        assert (call["grid"], call["stream"]) == ("5,6,7", str(0xABCDEF0123))
        assert call["symbol"] == every_kernel()[name].symbol
        assert call["device"] == call["module"] == "0"


def test_launch_parameters_come_from_the_pack(launched):
    entries = {e.name: e for e in pack.read(PACKS / "sm_90.pack")[2]}
    for (name, variant, _), call, module in launched:
        entry = entries[every_kernel()[name].variant(variant).name]
        assert call["threads"] == f"{32 * entry.num_warps},1,1" and call["shared"] == str(entry.shared)
        assert module["hash"] == fnv(entry.binary) and module["bytes"] == str(len(entry.binary))


def test_argument_buffers_have_the_size_in_the_table(launched):
    for (name, _, args), *_ in launched:
        *_, offset, size = every_kernel()[name].layout[-1]
        assert len(args) // 2 == offset + size


def launch_wide_rows():
    kernel = next(k for k in tables().kernels() if k.name == "layer_norm_bwd")
    narrow, wide = (kernel.pick({"X": "bf16", "W": "bf16"}, n, True) for n in (64, 16384))
    refused = [refusal(kernel.name, variant=v.index) for v in (narrow, wide)]
    return [wide.name, refused, calls("cuFuncSetAttribute")]


def test_large_shared_memory_is_requested():
    name, refused, asked = stub_cuda.run(launch_wide_rows).value
    (entry,) = (e for e in pack.read(PACKS / "sm_90.pack")[2] if e.name == name)
    assert entry.shared > 48 << 10 and refused == ["", ""]
    assert asked == [{"attribute": "8", "value": str(entry.shared)}]


def test_large_shared_memory_that_is_refused():
    environment = {"STUB_CUDA_FAIL": "cuFuncSetAttribute=1"}
    name, refused, _ = stub_cuda.run(launch_wide_rows, **environment).value
    assert refused[0] == "" and f"launch of {name} " in refused[1]
    assert "cuFuncSetAttribute returned CUDA_ERROR_INVALID_VALUE (1)" in refused[1]


# For one architecture only. Has tensor maps as arguments, so the driver receives each argument separately.
WITH_TENSOR_MAPS = "fused_linear_cross_entropy_exp_logits"
TYPES = {"i32": ("i", -7), "i64": ("q", -(2**40)), "fp32": ("f", 0.1), "map": ("128s", bytes(range(128)))}


def launch_each(kernels):
    found = []
    for kernel, args in kernels:
        launch(kernel, args=bytes.fromhex(args))
        found.append(calls("cuLaunchKernel")[-1]["args"])
    return found


def test_arguments_are_at_the_offsets_in_the_cubin():
    """Checks the offsets that the compiled kernel reads, not only those in the table."""
    binaries = {e.name: e.binary for e in pack.read(PACKS / "sm_90.pack")[2]}
    kernels = every_kernel()
    values = {
        name: [TYPES.get(kind, ("Q", 2**47 + 16 * i)) for i, (_, kind, *_) in enumerate(kernel.layout)]
        for name, kernel in kernels.items()
    }
    # Native alignment, as in a C++ struct with these members.
    args = {
        name: struct.pack("@" + "".join(code for code, _ in given), *(v for _, v in given))
        for name, given in values.items()
    }
    received = stub_cuda.run(launch_each, [(name, given.hex()) for name, given in args.items()]).value
    for name, found in zip(values, map(bytes.fromhex, received), strict=True):
        places = cubin_parameters(binaries[kernels[name].variant(0).name])
        # With tensor maps, arguments start at another boundary of the constant bank.
        start = places[0][0]
        assert start == 0 or kernels[name].takes_maps, name
        for (code, value), (offset, size) in zip(values[name], places, strict=True):
            assert found[offset - start : offset - start + size] == struct.pack("<" + code, value), name


def launch_on_each(kernel):
    refusals = [
        refusal(kernel, device=i, args=bytes(runtime.args_bytes(kernel))) for i in range(runtime.device_count())
    ]
    preloaded = [runtime.preload(i, ["fused_linear_cross_entropy"]) for i in range(len(refusals))]
    paths = [kernel in device["paths"] for device in json.loads(runtime.status())["devices"]]
    loads = [call["device"] for call in calls("cuModuleLoadData")]
    launches = [call for call in calls("cuLaunchKernel") if call.get("context") != "none"]
    return [refusals, preloaded, paths, launches, loads]


def test_a_kernel_for_one_architecture_runs_only_there():
    """Other devices do not load, request or list it."""
    devices = "8.0:108:Stub A100;9.0:132:Stub H200;10.0:148:Stub B200"
    refusals, preloaded, paths, launches, loads = stub_cuda.run(
        launch_on_each, WITH_TENSOR_MAPS, STUB_CUDA_DEVICES=devices
    ).value
    assert refusals[1] == "" and [x["device"] for x in launches] == ["1"] and launches[0]["threads"] == "384,1,1"
    for refused, arch in ((refusals[0], "sm_80"), (refusals[2], "sm_100")):
        assert f"it is not for {arch}" in refused
    assert paths == [False, True, False]
    # The kernel has one variant. Packs hold fewer variants of the other kernels for some architectures.
    variants = [loaded + missing for loaded, missing in preloaded]
    assert variants[0] == variants[2] == variants[1] - 1 and len(loads) == sum(loaded for loaded, _ in preloaded)


def test_tensor_map_arguments():
    flags = (f"-I{ROOT / 'csrc'}", f"-L{LIBRARIES}", "-lliger_runtime", f"-Wl,-rpath,{LIBRARIES}")
    program = compile_cpp("tensor_map", ROOT / "tests/support/host/stub_cuda/tensor_map.cpp", flags=flags)

    def lines(**env):
        done = subprocess.run([program], capture_output=True, text=True, env=stub_cuda.environment(**env), check=True)
        return done.stdout.splitlines()

    # Address, columns, rows, bytes per row, tile, swizzle. Unaligned addresses and rows are refused.
    mapped = ["1 1000 300 2048 64 128 3", "1 1000 300 2048 32 96 2"]
    refused = "cuTensorMapEncodeTiled returned CUDA_ERROR_INVALID_VALUE (1): the stub's text for error 1"
    assert lines() == ["1", *mapped, refused, refused]
    assert lines(STUB_CUDA_FAIL="cuTensorMapEncodeTiled=1") == ["1"] + 4 * [refused]
    unusable = "cuInit returned CUDA_ERROR_NO_DEVICE (100): the stub's text for error 100"
    assert lines(STUB_CUDA_FAIL="cuInit=100") == ["0"] + 4 * [unusable]


def launch_nothing():
    for grid in [(0, 1, 1), (1, 0, 1), (1, 1, 0)]:
        launch("column_sum", grid=grid)
    return runtime.device_count() and calls("cuLaunchKernel")


def test_an_empty_grid_launches_nothing():
    assert stub_cuda.run(launch_nothing).value == []


def wrong_calls():
    size = runtime.args_bytes("column_sum")
    out = []
    for kernel, variant, given in [("nothing", 0, size), ("column_sum", 10**6, size), ("column_sum", 0, size - 1)]:
        try:
            runtime.launch(kernel, variant, 0, (1, 1, 1), bytes(given))
        except ValueError as error:
            out.append(str(error))
    return [out, calls("cuLaunchKernel")]


def test_launches_that_do_not_match_the_tables():
    size = tables.find(KERNEL).layout[-1][2] + 8
    refused = ["no kernel named nothing", f"no such variant of {KERNEL}", f"{KERNEL} takes {size} bytes of arguments"]
    assert stub_cuda.run(wrong_calls).value == [refused, []]


# ---- Loading.


def load_from_many_threads(variants, threads):
    start = threading.Barrier(threads * runtime.device_count())
    failures = []

    def body(device):
        args = {kernel: bytes(runtime.args_bytes(kernel)) for kernel, _ in variants}
        start.wait()
        for kernel, variant in variants:
            try:
                runtime.launch(kernel, variant, device, (1, 1, 1), args[kernel])
            except Exception as error:
                failures.append(str(error))

    workers = [threading.Thread(target=body, args=(d,)) for d in range(runtime.device_count()) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [failures, calls("cuModuleLoadData"), calls("cuLaunchKernel"), calls("cuDevicePrimaryCtxRetain")]


def test_sixteen_threads_on_each_of_four_devices_load_a_kernel_once():
    variants = [(k, v.index) for k in ("column_sum", "rms_norm_fwd") for v in islice(sample(tables.find(k)), 8)]
    devices = ";".join(f"{c}:8:Stub" for c in ("8.0", "9.0", "9.0", "12.0"))
    value, _ = stub_cuda.run(load_from_many_threads, variants, 16, STUB_CUDA_DEVICES=devices)
    failures, modules, launches, contexts = value
    assert not failures
    assert sorted(m["device"] for m in modules) == sorted("0123" * len(variants))
    done = [c for c in launches if "symbol" in c]
    assert len(done) == 4 * 16 * len(variants) and all(c["device"] == c["module"] for c in done)
    assert sorted(c["device"] for c in contexts) == ["0", "1", "2", "3"]


def program_over_the_runtime(name):
    """A program of tests/support/host/stub_cuda."""
    flags = (f"-I{ROOT / 'csrc'}", "-rdynamic", f"-L{LIBRARIES}", "-lliger_runtime", f"-Wl,-rpath,{LIBRARIES}", "-ldl")
    return compile_cpp(name, ROOT / f"tests/support/host/stub_cuda/{name}.cpp", flags=flags)


@pytest.mark.parametrize("kernel", ["rms_norm_fwd", WITH_TENSOR_MAPS])
def test_later_launches_do_not_allocate_or_lock(kernel):
    program = program_over_the_runtime("hot_path")
    done = subprocess.run([program, kernel], capture_output=True, text=True, env=stub_cuda.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    first_allocations, first_locks, allocations, locks = map(int, done.stdout.split())
    assert first_allocations > 0 and first_locks > 0, "the counters do not count"
    assert allocations == locks == 0


def test_a_process_ends_while_threads_launch():
    program = program_over_the_runtime("exit_while_launching")
    for _ in range(20):
        done = subprocess.run([program], capture_output=True, text=True, env=stub_cuda.environment(), timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def query_without_launching():
    facts = [runtime.device(i) for i in range(runtime.device_count())]
    return [facts, driver.record().decode()]


def test_querying_devices_creates_no_context():
    (facts, record), _ = stub_cuda.run(query_without_launching, STUB_CUDA_DEVICES="8.0:108:Stub A100;9.0:132:Stub H200")
    assert facts == [["Stub A100", 80, 108], ["Stub H200", 90, 132]]
    assert "cuDevicePrimaryCtxRetain" not in record


def launch_from_new_threads():
    """The first thread loads the kernel, the second one finds it loaded."""
    launch("column_sum", stream=1)
    driver.forget()
    launch("column_sum", stream=2)
    return [calls("cuLaunchKernel"), calls("cuCtxSetCurrent"), calls("cuModuleLoadData"), calls("error")]


def test_a_thread_without_a_context_can_launch():
    """Autograd threads do this. No driver call may fail, because profilers and debuggers report failing calls."""
    launches, contexts, modules, errors = stub_cuda.run(launch_from_new_threads).value
    assert [c["stream"] for c in launches] == ["2"] and contexts == [{"device": "0"}]
    assert not modules and not errors


def launch_in_one_thread(count):
    args = bytes(runtime.args_bytes("column_sum"))
    for _ in range(count):
        runtime.launch("column_sum", 0, 0, (1, 1, 1), args)
    looks = len(calls("cuCtxGetCurrent"))
    driver.set_device(-1)
    runtime.launch("column_sum", 0, 0, (1, 1, 1), args)
    return [looks, [c.get("device") for c in calls("cuLaunchKernel")], calls("error")]


def test_the_context_is_queried_once_per_thread_and_after_it_was_lost():
    looks, devices, errors = stub_cuda.run(launch_in_one_thread, 5).value
    assert looks == 1 and devices == 5 * ["0"] + [None, "0"]
    assert errors == [{"call": "cuLaunchKernel", "code": "201"}]


def launch_under_device_guards(devices):
    args = bytes(runtime.args_bytes("column_sum"))
    for device in devices:
        driver.set_device(device)
        runtime.launch("column_sum", 0, device, (1, 1, 1), args)
    return [[c["device"] for c in calls("cuLaunchKernel")], calls("cuCtxSetCurrent"), calls("error")]


@pytest.mark.parametrize("devices", [[1], [0, 1, 0, 1]], ids=str)
def test_a_context_set_by_the_device_guard_is_kept(devices):
    env = {"STUB_CUDA_DEVICES": "9.0:132:Stub;9.0:132:Stub"}
    launched, contexts, errors = stub_cuda.run(launch_under_device_guards, devices, **env).value
    assert launched == [str(d) for d in devices] and not contexts and not errors


def launch_under_capture():
    driver.capture(1)
    message = refusal()
    return [message, calls("cuModuleLoadData"), driver.capture_mode(), driver.context_depth()]


def test_loading_during_a_capture_uses_relaxed_mode_and_restores_it():
    message, modules, mode, depth = stub_cuda.run(launch_under_capture).value
    assert not message and [m["mode"] for m in modules] == ["2"] and mode == depth == 0


def test_a_capture_that_cannot_be_relaxed_raises():
    message, _, mode, _ = stub_cuda.run(
        launch_under_capture, STUB_CUDA_FAIL="cuThreadExchangeStreamCaptureMode=719"
    ).value
    assert "failed: cuModuleLoadData returned CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)" in message and mode == 0


# ---- Failures.

# failing call -> ("known" if the message can name the device's model, expected reason)
FAILURES = {
    "cuInit=100": ("", r"cuInit returned CUDA_ERROR_NO_DEVICE \(100\)"),
    "cuDeviceGet=101": ("", r"cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE \(101\)"),
    "cuDeviceGetAttribute=1": ("", r"cuDeviceGetAttribute returned CUDA_ERROR_INVALID_VALUE \(1\)"),
    "cuDeviceGetName=1": ("", r"cuDeviceGetName returned CUDA_ERROR_INVALID_VALUE \(1\)"),
    "cuDevicePrimaryCtxRetain=2": ("known", r"cuDevicePrimaryCtxRetain returned CUDA_ERROR_OUT_OF_MEMORY \(2\)"),
    "cuCtxPushCurrent=201": ("known", r"cuCtxPushCurrent returned CUDA_ERROR_INVALID_CONTEXT \(201\)"),
    "cuModuleLoadData=2": ("known", r"cuModuleLoadData returned CUDA_ERROR_OUT_OF_MEMORY \(2\)"),
    "cuModuleLoadData=700": ("known", r"cuModuleLoadData returned CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"),
    "cuModuleGetFunction=2": ("known", r"cuModuleGetFunction returned CUDA_ERROR_OUT_OF_MEMORY \(2\)"),
    "cuModuleGetFunction=500": (
        "known",
        r"\S+/sm_90.pack: cuModuleGetFunction returned CUDA_ERROR_NOT_FOUND \(500\)",
    ),
    "cuCtxGetCurrent=201": ("known", r"cuCtxGetCurrent returned CUDA_ERROR_INVALID_CONTEXT \(201\)"),
    "cuCtxSetCurrent=2": ("known", r"cuCtxSetCurrent returned CUDA_ERROR_OUT_OF_MEMORY \(2\)"),
    "cuLaunchKernel=719": ("known", r"cuLaunchKernel \(256 threads\) returned CUDA_ERROR_LAUNCH_FAILED \(719\)"),
    "cuLaunchKernel=31337": ("known", r"cuLaunchKernel \(256 threads\) returned unknown CUDA error \(31337\)"),
}


def fail_then_recover():
    first = refusal(grid=(3, 2, 1))
    driver.fail(b"")
    return [first, refusal(grid=(3, 2, 1)), *(len(calls(name)) for name in ("cuModuleLoadData", "cuModuleUnload"))]


@cache
def failure(call):
    """The messages of two launches, of which the call fails in the first, and how many modules were loaded and unloaded."""
    return stub_cuda.run(fail_then_recover, STUB_CUDA_FAIL=call).value


@pytest.mark.parametrize("failing", FAILURES)
def test_a_failing_driver_call_gives_one_sentence(failing):
    known, reason = FAILURES[failing]
    device = r"device 0 \(Stub H200, sm_90\)" if known else "device 0"
    message, *_ = failure(failing)
    what = rf"launch of {re.escape(VARIANT)} with grid \(3, 2, 1\) on {device} failed"
    assert re.match(rf"{what}: {reason}: the stub's text for error \d+", message), message


@pytest.mark.parametrize("failing", [f for f in FAILURES if FAILURES[f][0]])
def test_a_temporary_failure_is_not_remembered(failing):
    first, second, *_ = failure(failing)
    assert first and not second


def sticky_launch():
    launch("column_sum")
    driver.fail(b"cuLaunchKernel=700")
    return refusal()


@pytest.mark.parametrize("blocking", ["", "0", "1"])
def test_sticky_errors_are_attributed_to_an_earlier_operation(blocking):
    message = stub_cuda.run(sticky_launch, CUDA_LAUNCH_BLOCKING=blocking).value
    assert "cuLaunchKernel (256 threads) returned CUDA_ERROR_ILLEGAL_ADDRESS (700)" in message
    assert ("; an earlier operation in this process caused it" in message) == (blocking != "1")


def test_a_module_without_its_kernel_is_unloaded():
    """Later launches load it again, and the last one succeeds. If loading fails, nothing is unloaded."""
    *_, loaded, unloaded = failure("cuModuleGetFunction=500")
    assert unloaded == loaded - 1 > 0
    *_, unloaded = failure("cuModuleLoadData=2")
    assert unloaded == 0


@pytest.mark.parametrize("failing", ["cuCtxPopCurrent=201", "cuThreadExchangeStreamCaptureMode=1"])
def test_optional_driver_calls_may_fail(failing):
    message, *_ = failure(failing)
    assert not message


def launch_out_of_range():
    return [refusal(device=d) for d in (1, 64, -1)]


def test_nonexistent_devices():
    missing, *out_of_range = stub_cuda.run(launch_out_of_range).value
    assert "on device 1 failed: cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE" in missing
    assert all(m.endswith("failed: device index out of range (at most 64 devices)") for m in out_of_range)


# ---- Status.


def status_of():
    launch("column_sum")
    return [json.loads(runtime.status()), driver.record().decode().count("cuDevicePrimaryCtxRetain")]


def test_status_reports_launches_and_uses_no_other_device():
    env = {"STUB_CUDA_DEVICES": '9.0:1:Stub "A\\";8.0:1:Stub B', "LIGER_OPS_JIT": "0"}
    (status, contexts), _ = stub_cuda.run(status_of, **env)
    assert contexts == 1
    assert [(d["name"], d["capability"]) for d in status["devices"]] == [('Stub "A\\"', 90), ("Stub B", 80)]
    assert status["kernels"]["column_sum"]["launches"] == [1, 0, 0, 0]
    assert not status["jit_enabled"] and status["pack_directory"] == str(PACKS)
