"""Checks the tests: applies one deliberate defect of defects.py at a time and runs the tests that should notice it.

    python tests/mutations/run.py [--only NAME ...] [--tier quick|all] [--jobs N] [--json OUT]

Works in copies of the checkout, one per job, with its tracked and new files and what was built in it. Defects in C++ need
a build of each copy, which takes some minutes the first time. Exits with 1 if the tests miss a defect.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[2]
# Ignored by git, but needed to run tests.
BUILT = (
    "liger_ops/lib", "liger_ops/packs", "liger_ops/include", "liger_ops/_declared.pyi",
    "build/test-packs", "build/test-packs.stamp",
)  # fmt: skip
# A defect may cause an endless loop.
TIMEOUT = 1200
CAUGHT, MISSED, FAILED = "caught", "MISSED", "FAILED"

running: set[subprocess.Popen] = set()


class CannotRun(Exception):
    """The reason why a defect says nothing about the tests."""


@dataclasses.dataclass
class Verdict:
    name: str
    file: str
    outcome: str  # CAUGHT, MISSED or FAILED
    detail: str  # the test that caught it, or the reason of a failure
    seconds: float


@dataclasses.dataclass(frozen=True)
class Settings:
    checkout: Path
    flat: bool
    tier: str


def mutated(defect: Defect, text: str) -> str:
    """The file's text with the defect."""
    if (found := text.count(defect.old)) != 1:
        raise CannotRun(f"its old text must occur once in {defect.file} (found {found} times)")
    return text.replace(defect.old, defect.new)


def tests_of(defect: Defect, tests: Path, flat: bool) -> list[str]:
    """pytest's arguments, without files that this checkout lacks."""
    words = shlex.split(defect.tests)
    split = words.index("-k") if "-k" in words else len(words)
    names = [Path(word).name if flat else word for word in words[:split]]
    found = [f"tests/{name}" for name in names if (tests / name).exists()]
    if not found:
        raise CannotRun(f"none of its test files exists ({', '.join(names)})")
    return found + words[split:]


def copy_checkout(source: Path, target: Path) -> None:
    listed = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in dict.fromkeys((*filter(None, names), *BUILT)):
        origin, copy = source / name, target / name
        if origin.is_dir():
            shutil.copytree(origin, copy, dirs_exist_ok=True)
        elif origin.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, copy)


def run(command: list[str], folder: Path, timeout: float | None = None, **environment: str) -> tuple[int, str]:
    """(exit status, output) of a command; its processes end with it."""
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    pipes: dict = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)
    running.add(process)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -signal.SIGALRM, ""
    finally:
        running.discard(process)
    return process.returncode, output


def pytest(folder: Path, arguments: list[str]) -> tuple[int, str]:
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    return run([sys.executable, "-m", "pytest", *options, *arguments], folder, TIMEOUT)


def first_failure(output: str) -> str:
    """The node of the first test that failed."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M)
    return found[1] if found else ""


class Copy:
    """A scratch copy of the checkout."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        copy_checkout(settings.checkout, folder)

    def build(self) -> None:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        status, output = run(command, self.folder)
        if status:
            errors = re.findall(r"error: .*", output) or [output[-300:]]
            raise CannotRun(f"does not compile: {errors[0]}")

    def keep_packs(self) -> None:
        """Declares the test packs current. To compile them again takes minutes, and tests that name a defect's kernel run
        it in the interpreter."""
        code = "import packs; packs.PACKS.with_suffix('.stamp').write_text(packs.state())"
        for path in self.folder.glob("tests/**/stub_cuda/packs.py"):
            run([sys.executable, "-c", code], self.folder, PYTHONPATH=str(path.parent))

    def arguments(self, defect: Defect) -> list[str]:
        tier = ["--tier", "all" if defect.thorough else self.settings.tier]
        has_tiers = "--tier" in (self.folder / "tests/conftest.py").read_text()
        return tests_of(defect, self.folder / "tests", self.settings.flat) + (tier if has_tiers else [])

    def failure_with(self, defect: Defect) -> str:
        """The first test that fails with the defect; empty if none does."""
        path, stamp = self.folder / defect.file, self.folder / "build/test-packs.stamp"
        text, packs = path.read_text(), stamp.read_text() if stamp.exists() else ""
        arguments = self.arguments(defect)
        path.write_text(mutated(defect, text))
        try:
            if defect.compiled:
                self.build()
            if packs:
                self.keep_packs()
            status, output = pytest(self.folder, arguments)
        finally:
            path.write_text(text)
            if packs:
                stamp.write_text(packs)
        if status == 0:
            return ""
        if status in (4, 5):
            raise CannotRun("pytest ran no test: " + " ".join(output.split()[-30:]))
        return first_failure(output) or f"{arguments[0]} (ended with status {status})"


def check(defect: Defect, copy: Copy, clean: Copy) -> tuple[str, str]:
    """(outcome, detail)"""
    try:
        failure = copy.failure_with(defect)
        # A test that fails anyway proves nothing.
        if "::" in failure and pytest(clean.folder, [failure])[0] == 1:
            raise CannotRun(f"{failure} fails without the defect too")
    except CannotRun as reason:
        return FAILED, str(reason)
    return (CAUGHT, failure) if failure else (MISSED, " ".join(copy.arguments(defect)))


def work(waiting: queue.Queue, scratch: Path, clean: Copy, settings: Settings, report) -> None:
    copy = None
    while True:
        try:
            defect = waiting.get_nowait()
        except queue.Empty:
            return
        copy = copy or Copy(scratch, settings)
        start = time.monotonic()
        outcome, detail = check(defect, copy, clean)
        report(Verdict(defect.name, defect.file, outcome, detail, round(time.monotonic() - start, 1)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="defects, or the start of their names")
    parser.add_argument("--kind", choices=("python", "cpp"), help="only defects without or with a build")
    parser.add_argument("--tier", choices=("quick", "all"), default="quick", help="of the tests, see CONTRIBUTING.md")
    parser.add_argument("--jobs", type=int, default=1, help="copies that work at the same time")
    parser.add_argument("--json", type=Path, help="file for the verdicts")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout to copy, with a built library")
    parser.add_argument("--flat", action="store_true", help="all its test files lie in tests/ itself")
    given = parser.parse_args()
    kinds = {None: (False, True), "python": (False,), "cpp": (True,)}[given.kind]
    chosen = [d for d in DEFECTS if d.compiled in kinds and d.name.startswith(tuple(given.only or [""]))]
    if not chosen:
        parser.error(f"--only must name defects (got {' '.join(given.only or [])})")
    settings = Settings(given.checkout.resolve(), given.flat, given.tier)
    waiting: queue.Queue = queue.Queue()
    # Those without a build first: they need a library without defects.
    for defect in sorted(chosen, key=lambda d: d.compiled):
        waiting.put(defect)
    verdicts: list[Verdict] = []
    lock = threading.Lock()

    def report(verdict: Verdict) -> None:
        with lock:
            verdicts.append(verdict)
            done = f"[{len(verdicts)}/{len(chosen)}]"
            print(f"{done} {verdict.name}: {verdict.outcome} {verdict.detail} ({verdict.seconds} s)", flush=True)
            if given.json:
                given.json.write_text(json.dumps([dataclasses.asdict(v) for v in verdicts], indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        clean = Copy(Path(folder) / "clean", settings)
        jobs = [
            threading.Thread(
                target=work, args=(waiting, Path(folder) / f"job{i}", clean, settings, report), daemon=True
            )
            for i in range(min(given.jobs, len(chosen)))
        ]
        try:
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
        finally:
            for process in [*running]:
                os.killpg(process.pid, signal.SIGKILL)

    print()
    width = max(len(v.name) for v in verdicts)
    for verdict in sorted(verdicts, key=lambda v: (v.outcome, v.file)):
        print(f"{verdict.outcome:7} {verdict.seconds:7.1f} s  {verdict.name:{width}}  {verdict.file}")
    counts = {outcome: sum(v.outcome == outcome for v in verdicts) for outcome in (CAUGHT, MISSED, FAILED)}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts[CAUGHT] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
