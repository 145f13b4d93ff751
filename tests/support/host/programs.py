"""Runs examples and benchmarks in forks, which need not import what all need, with what `python -m torch.distributed.run` tells
its processes."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.checks import forked_output_of
from tests.support.host.fork_server import server

IMPORTS = ("transformers.models.llama.modeling_llama", "liger_ops.transformers", "torch._dynamo", "matplotlib.pyplot")
FILE = "runpy.run_path(sys.argv[0], run_name='__main__')"
MODULE = "runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def output_of_program(program: str, *options: Any, processes: int = 1) -> str:
    """program: the path of a file, or the name of a module."""
    run = FILE if program.endswith(".py") else MODULE.format(name=program)
    code = f"import runpy, sys\nsys.argv[:] = {[program, *map(str, options)]}\n{run}"
    group = dict(WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    server()  # that all use
    with ThreadPoolExecutor(processes) as pool:
        started = [
            pool.submit(forked_output_of, code, IMPORTS, RANK=str(rank), LOCAL_RANK=str(rank), **group)
            for rank in range(processes)
        ]
        return "".join(one.result() for one in started)
