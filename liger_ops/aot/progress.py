"""Progress display of a build."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

# How ninja and Progress count, without a terminal.
COUNT = re.compile(r"(?P<label>\[|compiling kernels )(?P<done>\d+)/(?P<total>\d+)")


class Progress:
    """One line on a terminal; one line per ten percent in a log."""

    def __init__(self, total: int, label: str) -> None:
        self.total, self.label, self.done, self.start = total, label, 0, time.monotonic()

    def advance(self) -> None:
        self.done += 1
        seconds = time.monotonic() - self.start
        line = f"{self.label} {self.done}/{self.total}  {seconds:.0f} s"
        if sys.stderr.isatty():
            filled = 30 * self.done // self.total
            print(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {line}",
                end="" if self.done < self.total else "\n",
                file=sys.stderr,
                flush=True,
            )
        elif self.done * 10 // self.total != (self.done - 1) * 10 // self.total:
            print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Also on the terminal, because pip hides the output of a build. In containers there may be none."""
    print(line, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        return
    try:
        with open("/dev/tty", "w") as terminal:
            # A background process may write: the signal would stop it.
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            # pip's spinner turns at the end of the line.
            print(f"\n  {line} ", end="", file=terminal, flush=True)
            signal.signal(signal.SIGTTOU, before)
    except OSError:
        pass


def run(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Runs a build whose output pip may hide, and says how far it is: one line per ten percent."""
    start = time.monotonic()
    shown: set[tuple[str, int]] = set()
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as build:
        assert build.stdout is not None
        for line in build.stdout:
            print(line, end="", flush=True)
            if count := COUNT.match(line):
                done, total = int(count["done"]), int(count["total"])
                what = "steps" if count["label"] == "[" else "kernels"
                if (what, 10 * done // total) not in shown:
                    shown.add((what, 10 * done // total))
                    say(f"liger-ops: {done} of {total} {what}, {time.monotonic() - start:.0f} s")
    if build.returncode:
        raise subprocess.CalledProcessError(build.returncode, command)
