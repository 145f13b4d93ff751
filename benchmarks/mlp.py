"""A Llama MLP, down(act(gate(x)) * up(x)), compiled: its middle left to Inductor, or one operator of ours.

And, not compiled, the operator that goes on to the last product and keeps no act(gate) * up.
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
    """formula: (gate, up) -> act(gate) * up, as for the op alone; load_linear(): the op that ends in the projection."""

    def linear():
        product_linear = load_linear()
        return lambda x, gate, up, down: product_linear(F.linear(x, gate), F.linear(x, up), down)

    return Op(
        dims=("tokens", "hidden", "intermediate"),
        inputs=inputs,
        formula=mlp(formula),
        traffic=traffic,
        flops=flops,
        providers={
            # The case's torch.compile has reset the caches; resetting them again would throw its code away.
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
