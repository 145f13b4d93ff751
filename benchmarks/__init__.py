"""Benchmarks of liger-ops beside its peers: `python -m benchmarks --help`."""

import os

# Measuring memory on a CPU takes torch's profiler, which else logs every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
