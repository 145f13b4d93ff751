"""Runs the tests of csrc/runtime over the stub driver with a runtime that a sanitizer watches (make sanitize).

python tests/sanitize.py address|thread [PYTEST ARGUMENT ...]

address: AddressSanitizer and UndefinedBehaviorSanitizer. thread: ThreadSanitizer. A finding ends the process in which a test runs,
and the test fails with the sanitizer's report. Needs g++ with its sanitizers, and `make build`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.host.stub_cuda.sanitizers import KINDS, folder_of  # noqa: E402

CSRC = ROOT / "csrc"
FLAGS = (
    "-std=c++17",
    "-O1",
    "-g",
    "-fPIC",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
    "-fvisibility=hidden",
)
# Programs of their own, which are not built with the sanitizer; the first replaces malloc, as sanitizers do.
EXCLUDED = ("test_later_launches_do_not_allocate_or_lock", "test_a_process_ends_while_threads_launch")
TESTS = [f"tests/runtime/test_{name}.py" for name in ("runtime_launches", "runtime_sources", "packs")]


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


def build(kind: str) -> None:
    target = folder_of(kind)
    generated, objects = target / "generated", target / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "liger_ops/aot/build.py", "codegen", generated)
    python = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    flags = [
        *FLAGS,
        f"-fsanitize={KINDS[kind].flag}",
        f"-I{CSRC}",
        f"-I{generated}",
        "-include",
        CSRC / "runtime/portable.h",
    ]
    sources = [*CSRC.glob("runtime/*.cpp"), *CSRC.glob("gemm/*.cpp"), *generated.glob("kernels/*.cpp")]

    def compiled(source: Path) -> Path:
        made = objects / f"{source.parent.name}_{source.stem}.o"
        run("g++", *flags, *python, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        *runtime, bindings = pool.map(compiled, [*sources, CSRC / "bindings/runtime.cpp"])
    link = ["g++", "-shared", f"-fsanitize={KINDS[kind].flag}"]
    run(*link, *runtime, "-o", target / "libliger_runtime.so", "-ldl", "-lpthread")
    module = target / f"_runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
    run(*link, bindings, "-o", module, f"-L{target}", "-lliger_runtime", "-Wl,-rpath,$ORIGIN")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    given, more = parser.parse_known_args()
    build(given.kind)
    command = [sys.executable, "-m", "pytest", "-k", " and ".join(f"not {name}" for name in EXCLUDED), *(more or TESTS)]
    environment = {**os.environ, "LIGER_OPS_TEST_SANITIZER": given.kind}
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
