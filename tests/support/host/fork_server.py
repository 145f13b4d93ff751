"""Runs code in new processes that have torch, liger_ops and more imported already: forks of a server, which is started at
the first use. A fork takes milliseconds, and the imports take seconds.

The server starts no threads of torch and does not use CUDA, because neither survives a fork. For code that depends on the start of
a process (the order of imports, environment variables that libraries read when they load) use checks.run_python."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TextIO


class Fork:
    """A process that runs `code`. There, `channel` is the other end of this object's channel: a file of text lines."""

    def __init__(self, code: str, out: TextIO, err: TextIO, imports: Sequence[str] = (), **env: str) -> None:
        from tests.support.checks import environment_of_tree

        self.returncode: int | None = None
        self.connection, theirs = socket.socketpair()
        modules = json.dumps(["torch", "liger_ops", *imports]).encode()
        with theirs:
            socket.send_fds(server(), [modules], [theirs.fileno(), out.fileno(), err.fileno()])
        self.send({"code": code, "env": environment_of_tree(**env), "folder": os.getcwd()})
        self.received = b""

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # receive() says so
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self, deadline: float) -> Any:
        """The next message of the process; None when it has ended or at the deadline, a time.monotonic()."""
        while b"\n" not in self.received:
            if not select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            try:
                read = self.connection.recv(1 << 16)
            except ConnectionResetError:
                read = b""
            if not read:
                raise RuntimeError("the fork server has ended; its standard error says why")
            self.received += read
        line, _, self.received = self.received.partition(b"\n")
        message = json.loads(line)
        if isinstance(message, dict) and "returncode" in message:
            self.returncode = message["returncode"]
            return None
        return message

    def close(self) -> None:
        """The server kills the process if it still runs, with all that it started."""
        self.connection.close()


@cache
def server() -> socket.socket:
    from tests.support.checks import environment_of_tree

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # transformers asks for GPUs when it is imported, and without NVML this would use CUDA.
    env = environment_of_tree(OMP_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    command = [sys.executable, __file__, str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, start_new_session=True)

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


# ---- In the server


def serve(requests: socket.socket) -> None:
    """Forks until the tests' process ends."""
    running: dict[int, socket.socket] = {}
    ended, wake = socket.socketpair()
    for end in (ended, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        # One event at a time, because it may close the file of the next. poll() reports in the order of registration.
        fd = poll.poll()[0][0]
        if fd == requests.fileno():
            message, fds, *_ = socket.recv_fds(requests, 1 << 16, 3)
            if not message:
                for pid in running:
                    kill(pid)
                    os.waitpid(pid, 0)
                return
            prepare(json.loads(message))
            channel = socket.socket(fileno=fds[0])
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (requests, ended, wake, *running.values()):
                    inherited.close()
                run(channel, *fds[1:])
            running[pid] = channel
            poll.register(channel, 0)  # reports when the other end is closed
            for output in fds[1:]:
                os.close(output)
        elif fd == ended.fileno():
            ended.recv(1 << 16)
            for pid, status in ended_children():
                channel = running.pop(pid)
                poll.unregister(channel)
                with channel, suppress(OSError):  # its starter may have gone
                    channel.sendall(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        else:
            kill(next(pid for pid, channel in running.items() if channel.fileno() == fd))


def prepare(modules: list[str]) -> None:
    """Imports them. torch's threads would be missing in a fork. Threads of others are not used there: on some machines an
    optional dependency of transformers starts one when it is imported."""
    for module in modules:
        before = threads_of_process()
        importlib.import_module(module)
        started = threads_of_process() - before
        assert not started or module not in ("torch", "liger_ops"), f"{module} starts {len(started)} threads"
    sys.modules["torch"].set_num_threads(1)


def threads_of_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # not yet the leader of a group
        os.kill(pid, signal.SIGKILL)


def ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


# ---- In a fork


def run(channel: socket.socket, out: int, err: int) -> None:
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the server
        os.dup2(out, 1)
        os.dup2(err, 2)
        lines = channel.makefile("rw")
        request = json.loads(lines.readline())
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        sys.argv[:] = ["-c"]
        main = types.ModuleType("__main__")
        main.channel = lines
        sys.modules["__main__"] = main
        exec(compile(request["code"], "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
