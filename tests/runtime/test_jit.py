"""JIT compilation: it yields the same bytes as ahead-of-time compilation, and a disk cache stores them."""

import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import liger_ops.kernels as tables
from liger_ops._runtime import jit
from liger_ops.aot import pack
from tests.support.host import stub_cuda
from tests.support.host.stub_cuda import ARCHS, PACKS, sample
from tests.support.pairs import kernels_in_tiers

KERNEL = "column_sum"
HASH = tables.find(KERNEL).source_hash
ORIN = "8.7:16:Stub Orin"  # no pack serves it


def compiled(kernel, variant, arch, tmp_path):
    path = tmp_path / "compiled.pack"
    path.write_bytes(jit.compile_pack(kernel, variant, arch))
    return pack.read(path)


# ---- The hook.


@kernels_in_tiers()
def test_the_hook_reproduces_the_pack(name, tmp_path):
    """Equal bytes, so that tests of one path also cover the other."""
    variants = sample(tables.find(name))
    variant = variants[len(variants) // 2]
    kind, arch, entries = compiled(name, variant.index, 90, tmp_path)
    assert (kind, arch) == (pack.CUBIN, 90)
    assert entries == [e for e in pack.read(PACKS / "sm_90.pack")[2] if e.name == variant.name]


@pytest.mark.parametrize("arch", ARCHS)
def test_on_every_architecture_of_the_packs(arch, tmp_path):
    _, _, entries = compiled(KERNEL, 0, arch, tmp_path)
    assert entries == [e for e in pack.read(PACKS / f"sm_{arch}.pack")[2] if e.name == entries[0].name]


@pytest.mark.parametrize("arch", [75, 87, 103, 121])
def test_architectures_without_a_pack(arch, tmp_path):
    kind, found, (entry,) = compiled(KERNEL, 0, arch, tmp_path)
    assert (kind, found, entry.variant) == (pack.CUBIN, arch, 0) and entry.binary.startswith(b"\x7fELF")


def test_concurrent_compilation_restores_tritons_settings(monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    before = triton.knobs.cache.dir
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda variant: jit.compile_pack(KERNEL, variant, 90), [0, 1])
    assert first != second and triton.knobs.cache.dir == before
    assert not triton.knobs.compilation.disable_line_info and os.environ["TRITON_DISABLE_LINE_INFO"] == "0"


# ---- From a launch to the hook.


def through_torch(variants):
    import liger_ops

    out = [served_by("column_sum", variant=v) for v in variants]
    return [out, liger_ops.launch_counts(), liger_ops.status()["jit_compiler"]]


@pytest.mark.thorough
def test_the_op_library_compiles_through_torch(tmp_path):
    """A C++ launch calls triton.compile through liger::_compile_kernel and caches the result."""
    env = {"STUB_CUDA_DEVICES": ORIN, "LIGER_OPS_CACHE_DIR": tmp_path / "cache"}
    (by, counts, compiler), log = stub_cuda.run(through_torch, [0, 0], **env)
    assert by == ["hook", "hook"] and compiler and counts["jit"] == 1
    assert log == [f"{tables.find(KERNEL).variant(0).name}: compiling for sm_87"]
    (by, *_), log = stub_cuda.run(through_torch, [0], **env)
    assert by == ["cache"] and not log


def refused_through_torch():
    import liger_ops

    return [refusal(), liger_ops.launch_counts()]


@pytest.mark.thorough
def test_compiler_errors_reach_the_message(tmp_path):
    env = {"STUB_CUDA_DEVICES": "13.0:1:Stub", "LIGER_OPS_PACK_DIR": tmp_path}
    (message, counts), log = stub_cuda.run(refused_through_torch, **env)
    assert "sm_130) failed: no source has it" in message and "ptxas for sm_130 failed: " in message
    assert not any(counts.values()) and sum("was not compiled: " in line for line in log) == 1


def refused_without_triton():
    import importlib.metadata as metadata

    known = metadata.version

    def version(name):
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    metadata.version = version
    import liger_ops

    return [refusal(), liger_ops.status()["jit_compiler"], "triton" in sys.modules]


def test_without_triton_the_message_suggests_a_remedy(tmp_path):
    (message, compiler, imported), _ = stub_cuda.run(refused_without_triton, LIGER_OPS_PACK_DIR=tmp_path)
    assert "JIT: no compiler is registered (needs Python with Triton)" in message and not compiler and not imported


def hook_that_raises():
    def hook(kernel, variant, capability):
        raise ValueError(f"no luck with {kernel} {variant} {capability}")

    runtime.set_hook(hook)
    raised = refusal()
    runtime.set_hook(lambda *_: "text, not bytes")
    wrong = refusal()
    runtime.set_hook(lambda *_: b"LIGERPAK")
    damaged = refusal()
    runtime.set_hook(None)
    return [raised, wrong, damaged, refusal()]


def test_a_failing_hook(tmp_path):
    (raised, wrong, damaged, none), _ = stub_cuda.run(hook_that_raises, LIGER_OPS_PACK_DIR=tmp_path)
    assert "JIT: ValueError: no luck with column_sum 0 90" in raised
    assert "JIT: " in wrong and "bytes" in wrong
    assert "JIT: the compiled kernel: truncated at 8 bytes" in damaged
    assert "no compiler is registered" in none


# ---- The disk cache.


@pytest.fixture
def compiler_output(tmp_path):
    """Path of a pack with the first variant of KERNEL: a precomputed answer for hooks."""
    kind, arch, entries = pack.read(PACKS / "sm_80.pack")
    path = tmp_path / "answer.pack"
    pack.write(path, kind, arch, [e for e in entries if e.name == tables.find(KERNEL).variant(0).name])
    return str(path)


def serve(answer, compiler, variant=0):
    call_hook_with(answer)
    if compiler:
        runtime.set_compiler(compiler)
    else:
        runtime.set_hook(None)
        runtime.set_compiler("")
    return served_by(variant=variant)


@pytest.fixture
def source_of(compiler_output, tmp_path):
    """Returns the source that serves a launch on an Orin, and the log."""

    def call(compiler="triton-test", variant=0, capability="8.7", **env):
        defaults = {"LIGER_OPS_CACHE_DIR": tmp_path / "cache", "LIGER_OPS_PACK_DIR": tmp_path / "none"}
        done = stub_cuda.run(
            serve, compiler_output, compiler, variant, STUB_CUDA_DEVICES=f"{capability}:16:Stub", **defaults | env
        )
        # These lines are always logged if there are no packs and a compiler runs.
        return done.value, [
            line for line in done.log if "no kernel packs" not in line and ": compiling for " not in line
        ]

    return call


def test_a_compiled_kernel_is_cached_for_the_next_process(source_of, compiler_output, tmp_path):
    cache = tmp_path / "deep" / "cache"
    assert source_of(LIGER_OPS_CACHE_DIR=cache) == ("hook", [])
    assert source_of(LIGER_OPS_CACHE_DIR=cache) == ("cache", [])
    (file,) = (p for p in cache.rglob("*") if p.is_file())
    assert file == cache / "triton-test" / f"{KERNEL}-{HASH}-0-sm_87.pack"
    assert file.read_bytes() == open(compiler_output, "rb").read()
    assert (
        all(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in (cache, file.parent))
        and stat.S_IMODE(file.stat().st_mode) == 0o600
    )


@pytest.mark.parametrize("variable,below", [("XDG_CACHE_HOME", "liger_ops"), ("HOME", ".cache/liger_ops")])
def test_default_cache_folders(variable, below, source_of, tmp_path):
    source_of(LIGER_OPS_CACHE_DIR="", **{variable: tmp_path})
    assert (tmp_path / below / "triton-test").is_dir()


def test_without_a_cache_folder_nothing_is_cached(source_of):
    assert source_of(LIGER_OPS_CACHE_DIR="") == ("hook", [])


@pytest.mark.parametrize("change", [dict(compiler="triton-other"), dict(capability="7.5"), dict(variant=1)])
def test_the_cache_key_includes_compiler_architecture_and_variant(change, source_of):
    assert source_of()[0] == "hook"
    by, _ = source_of(**change)
    # The hook only has an answer for variant 0.
    assert by == (None if "variant" in change else "hook")
    assert source_of()[0] == "cache"


def test_the_cache_key_includes_the_source_hash(source_of, tmp_path):
    source_of()
    (file,) = (tmp_path / "cache").rglob("*.pack")
    file.rename(file.with_name(file.name.replace(HASH, f"{int(HASH, 16) ^ 1:016x}")))
    assert source_of()[0] == "hook"


def test_a_process_without_a_compiler_uses_the_newest_cached_kernel(source_of, tmp_path):
    for version in ("triton-3.6.0", "triton-3.10.0", "triton-3.9.1"):
        assert source_of(version)[0] == "hook"
    for older in ("triton-3.6.0", "triton-3.9.1"):
        for file in (tmp_path / "cache" / older).iterdir():
            file.write_bytes(b"never opened")
    assert source_of(compiler=None) == ("cache", [])


def make_unsafe(folder, how):
    if how == "writable by the group":
        folder.chmod(0o770)
    elif how == "writable by all":
        folder.chmod(0o707)
    elif how == "a link":
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))
    else:
        shutil.rmtree(folder)
        folder.write_text("a file")


UNSAFE = {
    "writable by the group": "it must belong to this user and not be writable by others",
    "writable by all": "it must belong to this user and not be writable by others",
    "a link": "it must be a folder and not a link",
    "a file": "it must be a folder and not a link",
}


@pytest.mark.parametrize("level", ["", "triton-test"])
@pytest.mark.parametrize("how", UNSAFE)
def test_a_folder_writable_by_others_is_not_used(how, level, source_of, tmp_path):
    source_of()
    folder = tmp_path / "cache" / level if level else tmp_path / "cache"
    make_unsafe(folder, how)
    assert source_of() == ("hook", [f"JIT cache folder {folder} is not used: {UNSAFE[how]}"])


def test_a_folder_of_another_user_is_not_used(source_of, tmp_path):
    folder = tmp_path / "cache"
    if os.geteuid() == 0:
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
    else:
        folder = "/usr"
    by, log = source_of(LIGER_OPS_CACHE_DIR=folder)
    assert by == "hook"
    assert log == [f"JIT cache folder {folder} is not used: it must belong to this user and not be writable by others"]


def test_a_folder_that_cannot_be_created(source_of):
    by, log = source_of(LIGER_OPS_CACHE_DIR="/dev/null/cache")
    assert by == "hook"
    assert log == ["JIT cache folder /dev/null/cache cannot be created: Not a directory; compiled kernels are not kept"]


@pytest.mark.parametrize("content", [b"", b"LIGERPAK", None])
def test_a_damaged_file_is_recompiled_and_replaced(content, source_of, tmp_path):
    source_of()
    (file,) = (tmp_path / "cache").rglob("*.pack")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + b"\0" * 9 if content is None else content)
    by, log = source_of()
    assert by == "hook" and len(log) == 1 and str(file) in log[0] and "ignored" in log[0]
    assert file.read_bytes() == whole and source_of() == ("cache", [])


def test_files_are_written_atomically(source_of, tmp_path):
    """Processes write the same kernel repeatedly while a thread reads it."""
    source_of()
    (file,) = (tmp_path / "cache").rglob("*.pack")
    done, seen = threading.Event(), set()

    def watch():
        while not done.is_set():
            try:
                seen.add(len(pack.read(file)[2]))
            except FileNotFoundError:
                pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(6):
            file.unlink()
            assert source_of()[0] == "hook"
    finally:
        done.set()
        watcher.join()
    assert seen == {1} and [p.name for p in file.parent.iterdir()] == [file.name]


def compile_with_triton(variants):
    tables()
    # The compiler does not need torch, and importing it in eight processes would dominate the run time.
    sys.modules["torch"] = type(sys)("torch")
    from liger_ops._runtime import jit

    runtime.set_hook(jit.compile_pack)
    runtime.set_compiler(jit.compiler())
    return [served_by(variant=v) for v in variants]


@pytest.mark.thorough
def test_eight_processes_share_a_new_cache(tmp_path):
    """Each process compiles with Triton. The cache folder does not exist yet."""
    env = {"STUB_CUDA_DEVICES": ORIN, "LIGER_OPS_CACHE_DIR": tmp_path / "cache"}
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: stub_cuda.run(compile_with_triton, [0, 3], **env), range(8)))
    for by, log in runs:
        assert set(by) <= {"hook", "cache"}
        assert all(line.endswith(": compiling for sm_87") for line in log)
    files = sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())
    assert files == [f"{KERNEL}-{HASH}-{v}-sm_87.pack" for v in (0, 3)]
    assert stub_cuda.run(compile_with_triton, [0, 3], **env) == (["cache", "cache"], [])
