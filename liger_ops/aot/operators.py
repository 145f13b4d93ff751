"""`python -m liger_ops build`: builds the operator library for the installed torch, from the sources in the package.

It needs only a C++ compiler and the headers of the installed torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

from . import built, flags
from .progress import Progress
from .torch_release import cxx_standard

MOST_ERROR_LINES = 10


class Step(NamedTuple):
    """A command and the file that it writes."""

    command: list[str]
    output: Path


class Plan(NamedTuple):
    objects: list[Step]
    library: Step


def plan(compiler: list[str], folder: Path, library: Path) -> Plan:
    """The steps that build `library`, with intermediate files in `folder`."""
    torch_folder = Path(torch.__file__).parent
    csrc, generated = built.source_folders()
    if not generated.exists():
        raise SystemExit(f"liger-ops: {generated} must hold the generated headers: run `make build` once")
    if not (built.LIBRARIES / "libliger_runtime.so").exists():
        raise SystemExit(f"liger-ops: {built.LIBRARIES} must hold libliger_runtime.so: reinstall the wheel")
    if not (torch_folder / "include" / "ATen" / "ATen.h").exists():
        raise SystemExit(f"liger-ops: the installed torch must have its C++ headers (none in {torch_folder}/include)")
    common = [*compiler, f"-std=c++{cxx_standard(torch_folder)}", *flags.COMPILE]
    common += [f"-ffile-prefix-map={csrc.parent}=liger_ops", f"-ffile-prefix-map={torch_folder}=torch"]
    common += [f'-DLIGER_NAMESPACE="{flags.NAMESPACE}"', f"-I{csrc}", f"-I{generated}"]
    common += ["-isystem", f"{torch_folder}/include", "-isystem", f"{torch_folder}/include/torch/csrc/api/include"]
    common += ["-include", str(csrc / flags.PORTABLE)]
    sources = flags.write_units(csrc, folder)
    objects = [Step([*common, "-c", str(source)], folder / f"{source.stem}.o") for source in sources]
    link = [*compiler, "-shared", *(str(step.output) for step in objects)]
    link += [f"-L{built.LIBRARIES}", "-lliger_runtime", f"-L{torch_folder}/lib", *flags.LINK]
    link += ["-Wl,-rpath,$ORIGIN", f"-Wl,-rpath,{built.LIBRARIES}", *flags.cxx_runtime(compiler)]
    return Plan(objects, Step(link, library))


def first_errors(text: str) -> str:
    lines = text.strip().splitlines()
    start = next((i for i, line in enumerate(lines) if re.search(r"error:|undefined reference|cannot find", line)), 0)
    return "\n".join(lines[start : start + MOST_ERROR_LINES])


def run(step: Step) -> None:
    """Writes the output atomically, because another compiler may be reading it."""
    part = step.output.with_name(f"{step.output.name}.{os.getpid()}.part")
    try:
        done = subprocess.run([*step.command, "-o", str(part)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"liger-ops: the compiler says:\n{first_errors(done.stderr)}")
        os.replace(part, step.output)
    finally:
        part.unlink(missing_ok=True)


def run_all(steps: Plan, jobs: int) -> None:
    progress = Progress(len(steps.objects) + 1, "compiling operators")
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(run, step) for step in steps.objects]
        try:
            for task in as_completed(tasks):
                task.result()
                progress.advance()
        except SystemExit:
            pool.shutdown(cancel_futures=True)
            raise
    run(steps.library)
    progress.advance()


def target_folder() -> Path:
    """The first writable folder."""
    for folder in built.folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise SystemExit(
        f"liger-ops: neither {' nor '.join(map(str, built.folders()))} can be written: set LIGER_OPS_LIBRARY_DIR"
    )


def loaded_elsewhere() -> str:
    """The library that a new process loads, or why it loads none."""
    code = "import liger_ops; print(liger_ops._loaded.library or liger_ops._loaded.tried)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(built.PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "LIGER_OPS_LIBRARY": ""})
    return done.stdout.strip() or done.stderr.strip()


def build(jobs: int, dry_run: bool) -> None:
    compiler = flags.compiler()
    if compiler is None:
        raise SystemExit(
            f"liger-ops: building needs a C++ compiler, and {os.environ.get('CXX') or 'g++'} is not on PATH: install "
            "GCC (`apt install g++`, `dnf install gcc-c++`, `conda install gxx`), or name another in CXX"
        )
    minor = ".".join(torch.__version__.split(".")[:2])
    library = target_folder() / built.library_name(minor)
    with tempfile.TemporaryDirectory(prefix="liger_ops_build") as folder:
        steps = plan(compiler, Path(folder), library)
        if dry_run:
            for step in (*steps.objects, steps.library):
                print(shlex.join([*step.command, "-o", str(step.output)]))
            return
        print(f"building the operators for torch {torch.__version__} with {compiler[0]}, {jobs} jobs", file=sys.stderr)
        run_all(steps, jobs)
    found = loaded_elsewhere()
    if found != str(library):
        raise SystemExit(f"liger-ops: {library} was built, but a new process does not load it (got {found})")
    print(library)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m liger_ops build", description="Build the operator library for the installed torch."
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="parallel compiler processes")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs must be 1 or more (got {arguments.jobs})")
    build(arguments.jobs, arguments.dry_run)
    return 0
