"""Methods with a given body, and what liger_ops.transformers.rewrite makes of them."""

import ast
import linecache
import textwrap
from typing import Any

import torch

from liger_ops.transformers import rewrite


def function(body: str, **names: Any):
    """A method with this body, which may use these names, and its source, which `inspect` can find."""
    source = "def forward(self, x, residual=None):\n" + textwrap.indent(body.strip(), "    ") + "\n"
    name = f"<test {len(linecache.cache)}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    scope = {"torch": torch, **names}
    exec(compile(source, name, "exec"), scope)
    return scope["forward"], source


def after(change, body: str, children) -> str | None:
    """The rewritten source, or None."""
    found, source = function(body)
    tree = ast.parse(source)
    changed = rewrite.change_all(change, tree.body[0], children)
    # Models get bytecode and not the tree: check that path too.
    assert (rewrite.rewritten(found, (change, children)) is not None) == changed
    return "\n".join(map(ast.unparse, tree.body[0].body)) if changed else None
