"""Changes numbers of patched modules, and hooks their children: every causal language model of the installed transformers.

    python -m benchmarks.changed_numbers [--types llama gemma2 ...] [--json FILE]

In a patched model with a tiny config, every bool, int, float and None that the original forward of a replaced module reads is
given another value. The loss and the gradients must be those of the plain model with the same change: an operator must obey
a number, leave the module to its own forward, or raise an error. A hook on every child that the original forward calls must run as often as
it does in the plain model. One module of each class is changed. A change with which the plain model fails, or which does not
change its results, says nothing and is counted apart.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .all_models import build, difference, model_types


def other_values(value: Any) -> Iterator[Any]:
    if value is None:
        yield from (0.5, 1)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(value // 2, 1))
    elif math.isfinite(value):
        yield value * 0.5 if value else 0.5


def run(model, ids) -> dict:
    import torch

    model.train()
    model.zero_grad()
    torch.manual_seed(1)
    # Of a random combination of the logits, which depends on every number.
    logits = model(input_ids=ids, use_cache=False).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.float() * weight).sum().backward()
    # A gradient that is 0 but for rounding may be exactly 0, or None, in one of two models.
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in model.named_parameters()}
    return {"logits": logits.detach()} | {n: g.clone() for n, g in gradients.items()}


def without_dropout(model) -> None:
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def first_of_each_class(model) -> Iterator[tuple[str, Any]]:
    """The patched modules that differ by class, and their paths."""
    from liger_ops.transformers.patched import Patched

    seen = set()
    for path, module in model.named_modules():
        if isinstance(module, Patched) and type(module) not in seen:
            seen.add(type(module))
            yield path, module


def read_by(module) -> tuple[dict[str, Any], list[str]]:
    """The numbers that the original forward may read, and the children that it may call."""
    from liger_ops.transformers.patched import original_class
    from liger_ops.transformers.reads import OF_MODULES, names_read

    names, passed = names_read(original_class(type(module)), "forward")
    own = vars(module).keys() - OF_MODULES
    held = {n: getattr(module, n) for n in (own if passed else own & names) if not n.startswith(("_", "liger_"))}
    for name in names - vars(module).keys() - OF_MODULES:
        held |= {name: getattr(type(module), name)} if name in vars(original_class(type(module))) else {}
    numbers = {n: v for n, v in held.items() if v is None or isinstance(v, (bool, int, float))}
    return numbers, [n for n, child in module._modules.items() if child is not None and (passed or n in names)]


def attempt(function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:120]


def calls(model, path: str, ids) -> Any:
    """How often a hook on the module runs."""
    found: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda *_: found.append(1))
    try:
        run(model, ids)
    finally:
        handle.remove()
    return len(found)


def compare(model_type: str) -> dict:
    import torch

    from liger_ops.linear import project
    from liger_ops.transformers import apply_liger_kernel

    project.LARGE = 0
    torch.set_num_threads(1)
    plain = attempt(build, model_type)
    if isinstance(plain, str):
        return {"model_type": model_type, "outcome": "does not build", "detail": plain}
    without_dropout(plain)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    # Some models keep states of their last call, which cannot be copied.
    ours = copy.deepcopy(plain)
    before = attempt(run, plain, ids)
    if isinstance(before, str):
        return {"model_type": model_type, "outcome": "does not run", "detail": before}
    noise = difference(before, run(plain, ids))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_liger_kernel(ours)
    own_error = difference(before, run(ours, ids))[0]
    counted, failures = collections.Counter(), []
    for path, module in first_of_each_class(ours):
        kind, numbers, children = type(module).liger_row[0], *read_by(module)
        mine = plain.get_submodule(path)
        for name, value in numbers.items():
            for other in other_values(value):
                present = {m: name in vars(m) for m in (mine, module)}
                for m in (mine, module):
                    setattr(m, name, other)
                theirs, found = attempt(run, plain, ids), attempt(run, ours, ids)
                for m in (mine, module):
                    setattr(m, name, value) if present[m] else delattr(m, name)
                if isinstance(theirs, str):
                    counted["plain model fails"] += 1
                    continue
                changes = difference(before, theirs)[0]
                if changes <= max(1e-6, 2 * noise):
                    counted["without effect"] += 1
                counted["numbers"] += 1
                if isinstance(found, str):
                    counted["refused"] += 1
                    continue
                gap = difference(theirs, found)
                if gap[0] > max(1e-3, 2 * noise, 2 * own_error):
                    said = f"{kind} {path} ({type(module).__name__}).{name} {value} -> {other}"
                    failures.append(f"{said}: {gap[1]} by {gap[0]:.2g}, changes {changes:.2g}")
        for name in children:
            child = f"{path}.{name}" if path else name
            wanted, got = attempt(calls, plain, child, ids), attempt(calls, ours, child, ids)
            counted["hooks"] += 1
            if wanted != got:
                failures.append(
                    f"{kind} {child} ({type(module).__name__}): its hook runs {got} times instead of {wanted}"
                )
    outcome = "ignores" if failures else "obeys"
    return {"model_type": model_type, "outcome": outcome, "counted": counted, "failures": failures, "error": own_error}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changed_numbers", description=__doc__)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, total = [], collections.Counter()
    for model_type in arguments.types or model_types():
        result = attempt(compare, model_type)
        if isinstance(result, str):
            result = {"model_type": model_type, "outcome": "ignores", "failures": [result]}
        results.append(result)
        total.update(result.get("counted", {}))
        print(model_type, result["outcome"], dict(result.get("counted", {})), result.get("detail", ""), flush=True)
        for failure in result.get("failures", ()):
            print("   ", failure, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    outcomes = collections.Counter(r["outcome"] for r in results)
    print(f"{len(results)} models: {dict(outcomes)}; {dict(total)}")
    sys.exit(outcomes["ignores"] > 0)


if __name__ == "__main__":
    main()
