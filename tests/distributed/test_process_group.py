"""Cases in process groups are reported one by one, and what fails in one does not reach the next."""

import time
from pathlib import Path

import group_cases
import pytest
from torch._inductor import config

from tests.support.checks import forked_output_of, output_of, run_forked
from tests.support.host import process_group
from tests.support.host.fork_server import Fork
from tests.support.host.process_group import error_of, run_case


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(process_group, "GRACE", 1.0)


@pytest.mark.thorough
def test_processes_compile_as_the_tests_do():
    """torch reads these settings when it is imported. Code for other instruction sets may be in the cache."""
    code = "from torch._inductor import config; print(config.cpp.vec_isa_ok)"
    assert forked_output_of(code, process_group.IMPORTS) == output_of(code) == f"{config.cpp.vec_isa_ok}\n"


def passes_next() -> bool:
    return error_of("passes", group_cases, 2) == ""


def test_a_case_passes_in_every_rank():
    run_case("passes", group_cases, 2)


def test_an_exception_is_reported_for_its_rank():
    error = error_of("raises in one rank", group_cases, 2)
    assert "ValueError: no good, said by 1" in error and error.startswith("rank 1: ") and "rank 0" not in error
    assert passes_next()


def test_exceptions_of_all_ranks_are_reported():
    with pytest.raises(pytest.fail.Exception, match="(?s)rank 0: .*said by 0.*rank 1: .*said by 1"):
        run_case("raises in every rank", group_cases, 2)


def test_ranks_that_wait_for_a_failed_one_are_not_waited_for():
    error = error_of("leaves the others waiting", group_cases, 2)
    assert "rank 0: Traceback" in error and "rank 1: did not finish" in error
    assert passes_next()


def test_a_crash_is_reported_with_the_log():
    error = error_of("crashes", group_cases, 2)
    assert "rank 1: ended with exit code -6\nlast words" in error
    assert passes_next()


@pytest.mark.thorough
def test_a_hang_is_reported_with_the_log_and_the_stack():
    # The group runs already, so that its start is not in the limit.
    assert passes_next()
    error = error_of("hangs", group_cases, 2, limit=5.0)
    assert "rank 1: did not finish\nbefore the wait" in error and "in hangs" in error and "rank 0" not in error
    assert passes_next()


def test_consecutive_cases_share_their_processes():
    assert error_of("leaves a mark", group_cases, 2) == error_of("finds the mark", group_cases, 2) == ""
    assert "AttributeError" in error_of("finds the mark", group_cases, 2, alone=True)


# ---- The server behind the groups


def test_a_fork_is_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import os, sys, liger_ops; print(os.getcwd(), os.environ['ONE'], 'pytest' in sys.argv[0], __name__)"
    assert forked_output_of(code, ONE="1") == f"{tmp_path} 1 False __main__\n"
    assert forked_output_of("import os; print('ONE' in os.environ)") == "False\n"


@pytest.mark.parametrize(
    "code, status, out, err",
    [
        ("import sys; print('said'); sys.exit(3)", 3, "said\n", ""),
        ("raise ValueError('no good')", 1, "", "ValueError: no good"),
        ("import os; os.abort()", -6, "", ""),
    ],
    ids=["exit", "exception", "abort"],
)
def test_a_fork_returns_status_and_output(code, status, out, err):
    done = run_forked(code)
    assert (done.returncode, done.stdout) == (status, out) and err in done.stderr


def test_a_fork_has_neither_threads_nor_cuda_of_the_server():
    code = "import os, torch; print(len(os.listdir('/proc/self/task')), torch.cuda._is_in_bad_fork())"
    assert forked_output_of(code, process_group.IMPORTS) == "1 False\n"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_closed_fork_is_killed_with_its_children(tmp_path):
    code = """
import os, subprocess, time
channel.write(f"[{os.getpid()}, {subprocess.Popen(['sleep', '600']).pid}]\\n")
channel.flush()
time.sleep(600)
"""
    with (tmp_path / "log").open("w") as log:
        fork = Fork(code, log, log)
    pids = fork.receive(time.monotonic() + 60)
    assert all(map(is_running, pids))
    fork.close()
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
