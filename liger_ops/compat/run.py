"""`python -m liger_ops run`: a script in whose process liger_ops serves `import liger_kernel`."""

from __future__ import annotations

import logging
import os
import runpy
import sys

from .finder import install

USAGE = """usage: python -m liger_ops run SCRIPT [ARGUMENTS]
       python -m liger_ops run -m MODULE [ARGUMENTS]

Runs a script or a module after liger_ops.compat.install(), and logs what is replaced in models. Trainer's
--use_liger_kernel then uses liger_ops: python -m liger_ops run train.py --use_liger_kernel ..."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    asks = arguments[:1] in (["-h"], ["--help"])
    if asks or arguments in ([], ["-m"]):
        print(USAGE, file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    install()
    logger = logging.getLogger("liger_ops")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        # Where Python looks first when it runs a script.
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0
