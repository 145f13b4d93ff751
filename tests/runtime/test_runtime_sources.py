"""csrc/runtime on a stub driver: sources of kernel binaries, architectures, preloading and the log."""

import re
import shutil

import pytest
import torch

import liger_ops.kernels as tables
from liger_ops.aot import codegen, pack
from tests.support.host import stub_cuda
from tests.support.host.stub_cuda import PACKS, compile_cpp, fnv, sample

KERNEL = "column_sum"
VARIANT = next(tables.find(KERNEL).variants()).name


def every_kernel():
    return {k.name: k for k in tables.kernels()}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with packs of one entry each, the first variant of KERNEL."""
    folder = tmp_path_factory.mktemp("single")
    for source in PACKS.glob("*.pack"):
        kind, arch, entries = pack.read(source)
        pack.write(folder / source.name, kind, arch, [e for e in entries if e.name == VARIANT])
    return folder


@pytest.fixture
def packs(tmp_path, single):
    """Makes a folder with these packs: packs("sm_90", "ptx")."""

    def make(*stems):
        folder = tmp_path / "packs"
        folder.mkdir()
        for stem in stems:
            shutil.copy(single / f"{stem}.pack", folder)
        return folder

    return make


def fill_cache(folder, single, arch, source=90):
    """Caches the pack of architecture `source` as if the JIT had compiled it for `arch`."""
    kernel = tables.find(KERNEL)
    target = folder / "triton-test" / f"{KERNEL}-{kernel.source_hash}-0-sm_{arch}.pack"
    target.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(single / f"sm_{source}.pack", target)
    return folder


# ---- The driver library.


def launch_without_driver():
    return [runtime.device_count(), refusal("column_sum")]


def unusable_driver(tmp_path, what):
    if what == "absent":
        # The loader stops at this file and does not find a real libcuda.
        (tmp_path / "libcuda.so.1").touch()
    else:
        (tmp_path / "empty.cpp").touch()
        shutil.copy(
            compile_cpp("libempty.so", tmp_path / "empty.cpp", flags=("-shared", "-fPIC")), tmp_path / "libcuda.so.1"
        )
    return tmp_path


@pytest.mark.parametrize(
    "what,reason",
    [
        ("absent", "the CUDA driver library libcuda.so.1 could not be loaded"),
        ("too old", "the CUDA driver lacks cuInit"),
    ],
)
def test_a_missing_driver_is_an_error_only_at_a_launch(what, reason, tmp_path):
    (devices, message), log = stub_cuda.run(launch_without_driver, LD_LIBRARY_PATH=unusable_driver(tmp_path, what))
    assert devices == 0 and not log
    assert message == f"launch of {VARIANT} with grid (1, 1, 1) on device 0 failed: {reason}"


# ---- Sources.


def served(hook_answer):
    asked = call_hook_with(hook_answer) if hook_answer else []
    return [served_by(), len(asked), refusal()]


@pytest.mark.parametrize("source", ["pack", "cache", "hook", "ptx"])
def test_each_source_alone(source, packs, single, tmp_path):
    env = {"LIGER_OPS_PACK_DIR": packs(*{"pack": ["sm_90"], "ptx": ["ptx"]}.get(source, []))}
    if source == "cache":
        env["LIGER_OPS_CACHE_DIR"] = fill_cache(tmp_path / "cache", single, 90)
    answer = str(single / "sm_90.pack") if source == "hook" else None
    (by, asked, _), _ = stub_cuda.run(served, answer, **env)
    assert by == source and asked == (source == "hook")


@pytest.mark.parametrize("failing,source", [(0, "pack"), (1, "cache"), (2, "hook"), (3, "ptx")])
def test_each_source_fails_over_to_the_next(failing, source, packs, single, tmp_path):
    """All four sources exist, and the driver refuses the first modules."""
    env = {
        "LIGER_OPS_PACK_DIR": packs("sm_90", "ptx"),
        "LIGER_OPS_CACHE_DIR": fill_cache(tmp_path / "cache", single, 90),
        "STUB_CUDA_FAIL": f"cuModuleLoadData=209@1-{failing}" if failing else "",
    }
    (by, asked, _), log = stub_cuda.run(served, str(single / "sm_90.pack"), **env)
    assert by == source and asked == (failing >= 2)
    assert sum("CUDA_ERROR_NO_BINARY_FOR_GPU" in line for line in log) == failing


def test_if_every_source_fails_the_message_names_each(packs, single, tmp_path):
    folder = packs("sm_90", "ptx")
    env = {"LIGER_OPS_CACHE_DIR": fill_cache(tmp_path / "cache", single, 90), "STUB_CUDA_FAIL": "cuModuleLoadData=209"}
    (_, _, message), _ = stub_cuda.run(served, str(single / "sm_90.pack"), LIGER_OPS_PACK_DIR=folder, **env)
    why = r"cuModuleLoadData returned CUDA_ERROR_NO_BINARY_FOR_GPU \(209\): the stub's text for error 209"
    sources = [f"{folder}/sm_90.pack", rf"{tmp_path}/cache/\S+\.pack", "the compiled kernel", f"{folder}/ptx.pack"]
    assert re.search("failed: " + "; ".join(f"{s}: {why}" for s in sources) + "$", message), message


def test_refused_sources_are_named_before_missing_ones(packs, single, tmp_path):
    folder = packs("sm_80", "ptx")
    env = {"LIGER_OPS_JIT": "0", "STUB_CUDA_FAIL": "cuModuleLoadData=222"}
    (_, _, message), _ = stub_cuda.run(served, None, LIGER_OPS_PACK_DIR=folder, **env)
    error = r"cuModuleLoadData returned unknown CUDA error \(222\): the stub's text for error 222"
    absent = f"{folder}: no pack for sm_90; JIT: switched off by LIGER_OPS_JIT=0"
    expected = rf"failed: {folder}/ptx.pack: {error}; no other source has it \([0-9a-f]{{16}}\): {absent}$"
    assert re.search(expected, message), message


# ---- Architectures.

# Source of kernels per device without a compiler: a pack of the same major version that is not newer, else PTX of the
# same or an older version. Integrated chips (8.7, 11.0) run only cubins for exactly their version.
SERVED = {
    "7.5": None, "8.0": "sm_80", "8.6": "sm_80", "8.7": "ptx", "8.9": "sm_80", "9.0": "sm_90", "10.0": "sm_100",
    "10.3": "sm_100", "11.0": "ptx", "12.0": "sm_120", "12.1": "sm_120", "13.0": "ptx",
}  # fmt: skip
ALL_DEVICES = ";".join(f"{capability}:100:Stub {capability}" for capability in SERVED)


def modules_by_device(count):
    out = []
    for device in range(count):
        message = refusal(device=device)
        images = [c["hash"] for c in calls("cuModuleLoadData") if c["device"] == str(device)]
        out.append([message, images])
    return out


def test_architecture_rules(single):
    expected = {p.stem: pack.read(p)[2][0].binary for p in single.glob("*.pack")}
    found, _ = stub_cuda.run(modules_by_device, len(SERVED), STUB_CUDA_DEVICES=ALL_DEVICES, LIGER_OPS_PACK_DIR=single)
    for (capability, stem), (message, images) in zip(SERVED.items(), found):
        assert images == ([fnv(expected[stem])] if stem else []), capability
        assert bool(message) == (stem is None), message
    refused = found[list(SERVED).index("7.5")][0]
    what = rf"launch of {re.escape(VARIANT)} with grid \(1, 1, 1\) on device 0 \(Stub 7\.5, sm_75\) failed"
    compiler = r"JIT: no compiler is registered \(needs Python with Triton\)"
    why = f"{single}: no pack for sm_75; {compiler}; {single}: no PTX for sm_75"
    assert re.fullmatch(rf"{what}: no source has it \([0-9a-f]{{16}}\): {why}", refused), refused


def modules_loaded():
    return [refusal(), [c["hash"] for c in calls("cuModuleLoadData")]]


def test_of_two_packs_that_fit_the_newer_one_serves(packs, single):
    folder, (_, _, (entry,)) = packs("sm_80"), pack.read(single / "sm_90.pack")
    pack.write(folder / "sm_86.pack", pack.CUBIN, 86, [entry])
    env = {"STUB_CUDA_DEVICES": "8.9:100:Stub", "LIGER_OPS_PACK_DIR": folder}
    assert stub_cuda.run(modules_loaded, **env).value == ["", [fnv(entry.binary)]]


def hook_requests(count, answer):
    asked = call_hook_with(answer)
    return [[served_by(device=d) for d in range(count)], [capability for *_, capability in asked]]


def test_devices_without_a_pack_get_kernels_for_their_own_architecture(single):
    answer = str(single / "sm_90.pack")
    (by, asked), _ = stub_cuda.run(
        hook_requests, len(SERVED), answer, STUB_CUDA_DEVICES=ALL_DEVICES, LIGER_OPS_PACK_DIR=single
    )
    assert dict(zip(SERVED, by)) == {c: "hook" if s in (None, "ptx") else "pack" for c, s in SERVED.items()}
    assert asked == [75, 87, 110, 130]


def rules():
    capabilities = [75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121, 130]
    return [[t, d, runtime.cubin_runs_on(t, d), runtime.ptx_runs_on(t, d)] for t in capabilities for d in capabilities]


def test_every_pair_of_architectures():
    tegra = {87, 101, 110}
    for target, device, cubin, ptx in stub_cuda.run(rules).value:
        family = target // 10 == device // 10 and target <= device and not {target, device} & tegra
        assert cubin == (target == device or family), (target, device)
        assert ptx == (target <= device), (target, device)


# ---- Driver errors while loading.

# These errors are not caused by the binary: an earlier kernel failed, no memory, device lost, process exit.
STICKY = [700, 702, 710, 714, 715, 716, 717, 718, 719, 721]
ENDS_THE_SEARCH = [*STICKY, 2, 3, 4, 46, 100, 101, 201, 214, 220, 709, 900, 999]
REFUSES_THE_BINARY = [1, 200, 209, 218, 221, 222, 223, 225, 300, 301, 302, 303, 500, 801]
EARLIER = (
    "; an earlier operation in this process caused it (run with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer to find it)"
)


def loads_that_fail(errors, hook_answer):
    asked = call_hook_with(hook_answer)
    out = []
    for error in errors:
        driver.forget()
        driver.fail(f"cuModuleLoadData={error}".encode())
        out.append([runtime.loads("column_sum"), refusal(), len(calls("cuModuleLoadData")), len(asked)])
        asked.clear()
    driver.fail(b"")
    return [out, runtime.loads("column_sum"), served_by()]


def test_device_errors_end_the_search(packs, single):
    """No other source is tried, nothing is compiled, and the next launch searches again."""
    (failed, loads, by), log = stub_cuda.run(
        loads_that_fail, ENDS_THE_SEARCH, str(single / "sm_90.pack"), LIGER_OPS_PACK_DIR=packs("sm_90", "ptx")
    )
    for error, (verdict, message, loaded, asked) in zip(ENDS_THE_SEARCH, failed, strict=True):
        assert (verdict, loaded, asked) == ("not now", 2, 0), error
        hint = EARLIER if error in STICKY else ""
        text = rf"cuModuleLoadData returned [\w ]+ \({error}\): the stub's text for error {error}{re.escape(hint)}"
        where = r"launch of \S+ with grid \(1, 1, 1\) on device 0 \(Stub H200, sm_90\)"
        assert re.fullmatch(f"{where} failed: {text}", message)
    assert loads == "yes" and by == "pack"
    assert len(log) == len(ENDS_THE_SEARCH) and all(line.startswith(f"loading {VARIANT} on device 0") for line in log)


def test_binary_errors_lead_to_the_next_source(packs, single):
    (failed, loads, by), _ = stub_cuda.run(
        loads_that_fail, REFUSES_THE_BINARY, str(single / "sm_90.pack"), LIGER_OPS_PACK_DIR=packs("sm_90", "ptx")
    )
    for error, (verdict, message, loaded, asked) in zip(REFUSES_THE_BINARY, failed, strict=True):
        # Two attempts, each with the pack, the compiled kernel and PTX.
        assert (verdict, loaded, asked) == ("no", 6, 2), error
        assert "sm_90.pack: cuModuleLoadData returned " in message and EARLIER not in message
    assert loads == "yes" and by == "pack"


# ---- Preloading.


def preload(ops):
    counts = runtime.preload(0, ops)
    modules = len(calls("cuModuleLoadData"))
    for kernel in runtime.kernels_of(ops):
        launch(kernel)
    return [counts, modules, len(calls("cuModuleLoadData")), runtime.preload(0, ops)]


@pytest.mark.parametrize("ops", [[], ["fused_add_rms_norm", "rope_freqs_cis"]])
def test_preload_leaves_nothing_to_load(ops):
    wanted = ops and ["rms_norm_fwd", "rms_norm_bwd", "column_sum", "rope"]
    kernels = [k for name, k in every_kernel().items() if not ops or name in wanted]
    held, total = sum(len(sample(k)) for k in kernels), sum(len([*k.variants()]) for k in kernels)
    counts, before, after, again = stub_cuda.run(preload, ops).value
    assert counts == again == [held, total - held] and before == after == held


def preload_only():
    asked = call_hook_with("/nowhere")
    return [runtime.preload(0), len(asked)]


def test_preload_does_not_compile(single, tmp_path):
    total = sum(len([*k.variants()]) for k in every_kernel().values() if k.is_for(130))
    cache = fill_cache(tmp_path / "cache", single, 130)
    env = {"STUB_CUDA_DEVICES": "13.0:200:Stub", "LIGER_OPS_CACHE_DIR": cache, "LIGER_OPS_PACK_DIR": single}
    assert stub_cuda.run(preload_only, **env).value == [[1, total - 1], 0]


def kernels_by_operator(ops):
    return {op: runtime.kernels_of([op]) for op in ops}


def public_operators():
    names = [n.removeprefix("liger::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("liger::")]
    return [name for name in names if not name.startswith("_")]


def test_preload_knows_the_kernels_of_every_operator():
    """As found in the C++ sources, including kernels shared with other operators."""
    launched_by = codegen.operators_of()
    stems = {stem for stems in launched_by.values() for stem in stems}
    expected = {}
    for op in public_operators():
        name = op.removeprefix("vocab_parallel_") + "_"
        stem = max((s for s in stems if name.startswith(f"{s}_")), key=len)
        expected[op] = {kernel.name for kernel in tables.kernels() if stem in launched_by[kernel.name]}
    assert all(any(f"{op}_".startswith(f"{stem}_") for op in expected) for stem in stems)
    found = stub_cuda.run(kernels_by_operator, sorted(expected)).value
    assert {op: set(kernels) for op, kernels in found.items()} == expected


def preload_errors(requests):
    out = []
    for device, ops, failing in requests:
        driver.fail(failing.encode())
        try:
            out.append(runtime.preload(device, ops))
        except RuntimeError as error:
            out.append(str(error))
    return out


def test_preload_of_what_is_wrong():
    """Operators that do not exist, a device that does not exist, and a device error, at which it stops."""
    unknown = [(0, ["rms_norm", name], "") for name in ("rms", "rms_norms")]
    requests = [*unknown, (9, [], ""), (0, [], "cuModuleLoadData=700@3")]
    *refused, missing, failed = stub_cuda.run(preload_errors, requests).value
    assert refused == [f"ops must be operators that launch kernels (got '{name}')" for name in ("rms", "rms_norms")]
    assert missing.startswith("cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE (101)")
    what = r"loading \S+ on device 0 \(Stub H200, sm_90\) failed: cuModuleLoadData returned CUDA_ERROR_ILLEGAL_ADDRESS"
    assert re.match(what, failed) and failed.endswith(EARLIER)


# ---- Log and messages.


@pytest.mark.parametrize("ptx", [True, False])
def test_jit_switched_off(ptx, packs, single, tmp_path):
    """Neither the disk cache nor the hook is used, and the message says so."""
    env = {
        "LIGER_OPS_JIT": "0",
        "STUB_CUDA_DEVICES": "13.0:200:Stub",
        "LIGER_OPS_PACK_DIR": packs("sm_90", *["ptx"] * ptx),
        "LIGER_OPS_CACHE_DIR": fill_cache(tmp_path / "cache", single, 130),
    }
    (by, asked, message), _ = stub_cuda.run(served, str(single / "sm_90.pack"), **env)
    assert by == ("ptx" if ptx else None) and not asked
    assert ptx or "no pack for sm_130; JIT: switched off by LIGER_OPS_JIT=0; " in message


def launch_repeatedly(answer):
    call_hook_with(answer)
    return [served_by() for _ in range(3)]


def test_each_line_is_logged_once(packs, single, tmp_path):
    folder = packs("sm_90")
    (folder / "sm_80.pack").write_bytes(b"LIGER")
    answer = str(single / "sm_90.pack")
    env = {"STUB_CUDA_DEVICES": "12.0:1:Stub", "LIGER_OPS_PACK_DIR": folder, "LIGER_OPS_CACHE_DIR": tmp_path / "cache"}
    by, log = stub_cuda.run(launch_repeatedly, answer, **env)
    assert by == ["hook"] * 3
    assert log == [
        f"kernel pack ignored: {folder}/sm_80.pack: truncated at 5 bytes",
        f"{VARIANT}: compiling for sm_120",
    ]


def test_ptx_is_logged_once_for_all_kernels(single):
    by, log = stub_cuda.run(launch_repeatedly, "/nowhere", STUB_CUDA_DEVICES="13.0:1:Stub", LIGER_OPS_PACK_DIR=single)
    assert by == ["ptx"] * 3 and log[-1] == "kernels for sm_130 are compiled by the driver from PTX" and len(log) == 3


def test_the_log_can_be_silenced(packs):
    folder = packs("sm_90")
    (folder / "sm_80.pack").write_bytes(b"LIGER")
    _, log = stub_cuda.run(launch_repeatedly, "/nowhere", LIGER_OPS_PACK_DIR=folder, LIGER_OPS_LOG="0")
    assert log == []
