"""Benchmarks of liger-ops and its peers: `python -m benchmarks --help`."""

import os

# Memory on a CPU is measured with torch's profiler, which logs every start and stop by default.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
