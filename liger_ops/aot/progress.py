"""Progress display of a build."""

from __future__ import annotations

import heapq
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

# How ninja and Progress report their steps, without a terminal. ninja's name the file that is written.
STEP = re.compile(r"\[(?P<done>\d+)/(?P<total>\d+)\] .*?(?P<file>[^/\s]+)$")
KERNELS = re.compile(r"compiling kernels (?P<done>\d+)/(?P<total>\d+)")
# Seconds between two updates of the line on a terminal, and the most between two lines of a log.
TICK, QUIET = 2.0, 20.0


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


class Share:
    """The finished share of a build, by the time that steps are expected to take.

    seconds: the files that long steps write, and the core-seconds of each. kernels: the core-seconds of all kernels.
    """

    def __init__(self, seconds: Iterable[tuple[str, float]], kernels: float) -> None:
        self.left, self.kernels = list(seconds), kernels
        self.done, self.compiled, self.steps = 0.0, 0.0, len(self.left)

    def read(self, line: str) -> None:
        if step := STEP.match(line):
            self.steps = int(step["total"]) - int(step["done"])
            if found := next((each for each in self.left if each[0] == step["file"]), None):
                self.left.remove(found)
                self.done += found[1]
        elif count := KERNELS.match(line):
            self.compiled = self.kernels * int(count["done"]) / int(count["total"])

    def __float__(self) -> float:
        # A repeated build omits steps: no more are left than ninja counts.
        left = sum(heapq.nlargest(self.steps, (seconds for _, seconds in self.left)))
        done = self.done + self.compiled
        return done / (self.done + left + self.kernels) if done else 0.0


def on_terminal(line: str, again: bool = False) -> None:
    """On the terminal, because pip hides the output of a build. In containers there may be none.

    again: in place of the line before.
    """
    try:
        with open("/dev/tty", "w") as terminal:
            # A background process may write: the signal would stop it.
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            try:
                # pip's spinner turns at the end of the line.
                start = "\r\033[K" if again else "\n"
                print(f"{start}  {line} ", end="", file=terminal, flush=True)
            finally:
                signal.signal(signal.SIGTTOU, before)
    except OSError:
        pass


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        on_terminal(line)


def run(
    command: Sequence[str], env: Mapping[str, str], seconds: Iterable[tuple[str, float]] = (), kernels: float = 0
) -> None:
    """Runs a build whose output pip may hide, and says how far it is: all the time on pip's terminal, now and then in the
    log."""
    share, start = Share(seconds, kernels), time.monotonic()
    shown, logged, said = 0, 0, start
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as build:
        assert build.stdout is not None
        output = build.stdout

        def read() -> None:
            for line in output:
                print(line, end="", flush=True)
                share.read(line)

        reader = threading.Thread(target=read)
        reader.start()
        while reader.is_alive():
            reader.join(TICK)
            now, first = time.monotonic(), not shown and said == start
            shown = max(shown, int(100 * float(share)))
            line = f"liger-ops: {shown} % done, {now - start:.0f} s"
            if not sys.stderr.isatty():
                on_terminal(line, again=not first)
            if shown // 10 > logged or now - said > QUIET or first:
                logged, said = shown // 10, now
                print(line, file=sys.stderr, flush=True)
    if build.returncode:
        raise subprocess.CalledProcessError(build.returncode, command)
    say(f"liger-ops: built in {time.monotonic() - start:.0f} s")
