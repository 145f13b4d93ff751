"""fused_linear_log_probs(input: (tokens, hidden), weight: (classes, hidden), target: (tokens,)), the head frozen"""

from benchmarks.linear_log_probs import declare

OP = declare(frozen=True, products=2, mib=640)
