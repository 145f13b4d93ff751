"""A compiled Llama MLP, down(act(gate(x)) * up(x)), whose activation is Inductor's or ours.

"ours eager" is not compiled. "ours linear" includes the down projection and does not save act(gate) * up.
"""

import torch
import torch.nn.functional as F

from benchmarks.op import Anchor, Op, Relative

NO_SLOWER_THAN_INDUCTOR = dict.fromkeys(("forward", "full"), Relative(1.0, ("torch.compile",)))


def inputs(make, tokens, hidden, intermediate):
    def weight(outs, ins):
        return make.normal(outs, ins).mul_(ins**-0.5)

    return {
        "x": make.normal(tokens, hidden),
        "gate": weight(intermediate, hidden),
        "up": weight(intermediate, hidden),
        "down": weight(hidden, intermediate),
    }


def traffic(size, tokens, hidden, intermediate):
    read = (tokens * hidden + 3 * hidden * intermediate) * size
    return read, 2 * read


def flops(tokens, hidden, intermediate):
    gemms = 3 * 2 * tokens * hidden * intermediate
    return gemms, 2 * gemms


def mlp(gated):
    return lambda x, gate, up, down: F.linear(gated(F.linear(x, gate), F.linear(x, up)), down)


def mlp_op(formula, load_ours, load_linear):
    """formula: (gate, up) -> act(gate) * up. load_linear(): returns the op that includes the down projection."""

    def linear():
        gated_linear = load_linear()
        return lambda x, gate, up, down: gated_linear(F.linear(x, gate), F.linear(x, up), down)

    return Op(
        dims=("tokens", "hidden", "intermediate"),
        inputs=inputs,
        formula=mlp(formula),
        traffic=traffic,
        flops=flops,
        providers={
            # No reset of the caches here: it would drop the code of the provider torch.compile.
            "ours": lambda: torch.compile(mlp(load_ours()), dynamic=False),
            "ours eager": lambda: mlp(load_ours()),
            "ours linear": linear,
        },
        shapes={
            "quick": [(2048, 2048, 5504)],
            "full": [(8192, 4096, 11008), (8192, 4096, 14336), (8192, 3584, 18944)],
        },
        dtypes={"full": ("bfloat16",)},
        anchors=(Anchor((8192, 4096, 14336), "bfloat16", NO_SLOWER_THAN_INDUCTOR),),
    )
