"""fused_linear_log_probs(input: (tokens, hidden), weight: (classes, hidden), target: (tokens,)), the head trained"""

from benchmarks.linear_log_probs import declare

OP = declare(frozen=False, products=4, mib=320)
