"""Generates docs/operators.md from the declarations, and layouts of DTensors from the docstrings of their rules. Its
introduction is the docstring of liger_ops.reference.

python -m liger_ops.aot.operators_page docs/operators.md
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from .. import reference
from ..reference import Operator, operators
from ..reference._documentation import Described, Documentation, documentation
from ..reference._operator import SCHEMA_TYPES, result_count, written

WIDTH = 120
RULES = Path(__file__).parents[1] / "distributed" / "rules"
WITHOUT_RULES = "there are no rules. Convert the inputs with ``to_local()`` or ``full_tensor()``."


def markdown(text: str) -> str:
    """Of a docstring's text. A mention of an operator is a link."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name}`](#{name})" if name in operators() else f"`{name}`"

    return re.sub(r":\w+:`([^`]*)`", link, text).replace("``", "`")


def filled(text: str, indent: str = "") -> str:
    """Lines of at most WIDTH characters; none breaks in code, which could then look like another kind of line."""
    kept = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.fill(kept, WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    return lines.replace("\0", " ")


def paragraphs(*texts: str) -> str:
    return "\n\n".join(filled(markdown(text)) for text in texts if text)


def parameters(operator: Operator) -> list[inspect.Parameter]:
    return [*operator.__signature__.parameters.values()]


def signature(operator: Operator) -> str:
    arguments = []
    for p in parameters(operator):
        if p.kind is p.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(p.name if p.default is p.empty else f"{p.name}={written(p.default)}")
    result = str(operator.__signature__.return_annotation)
    line = f"{operator.__name__}({', '.join(arguments)}) -> {result}"
    # Defaults and types stay whole.
    lines = textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", *lines, "```"])


def argument_row(operator: Operator, p: inspect.Parameter, described: Described | None) -> str:
    default = "" if p.default is p.empty else f"`{written(p.default)}`"
    if described is None:
        values = operator.choices.get(p.name)
        kind = SCHEMA_TYPES[operator.types[p.name]].removesuffix("?")
        return f"| `{p.name}` | {', '.join(f'`{written(v)}`' for v in values) if values else kind} | {default} | |"
    constant = p.name in operator.constants or described.is_of("indices") or described.is_of("bool")
    shape = f"{described.shapes} {described.note}".strip()
    return f"| `{p.name}` | {markdown(shape)} | {default} | {'no' if constant else 'yes'} |"


def arguments_table(operator: Operator, found: Documentation) -> str:
    rows = [argument_row(operator, p, found.tensors.get(p.name)) for p in parameters(operator)]
    return "\n".join(["| argument | shape or values | default | gradient |", "|---|---|---|---|", *rows])


def results(operator: Operator, found: Documentation) -> str:
    fields = getattr(operator.result, "_fields", None)
    if fields is None:
        return f"**Result{'s' * (result_count(operator.result) > 1)}:** {found.result}." if found.result else ""
    shapes = f": {found.result}" if found.result else ""
    meaning = re.sub(r"\s+", " ", operator.result.__doc__ or "")
    return f"**Results:** `{operator.result.__name__}({', '.join(fields)})`{shapes}. {meaning}"


def example(found: Documentation) -> str:
    """The code, with its output as comments."""
    lines = []
    for each in found.examples:
        lines += [each.source.rstrip("\n"), *(f"# {line}" for line in each.want.splitlines())]
    return "\n".join(["```python", *lines, "```"])


def arguments_of_form(operator: Operator, base: Operator, found: Documentation) -> str:
    """The arguments that differ from those of the base operator."""
    known = base.__signature__.parameters
    added = [f"`{name}`" for name in operator.__signature__.parameters if name not in known]
    text = f"Takes the arguments of :func:`{base.__name__}`"
    text += f", and {', '.join(added)}." if added else "."
    of_base = documentation(base).tensors
    noted = [
        f"`{name}`: {t.shapes} {t.note}"
        for name, t in found.tensors.items()
        if t.note and (name not in of_base or t.note != of_base[name].note)
    ]
    return f"{text} {', '.join(noted)}." if noted else text


def former_names(operator: Operator) -> str:
    names = [f"`{o.__name__}`" for o in operators().values() if o.alias_of is operator]
    return f"Deprecated alias: {', '.join(names)}, which requires the arguments `group` and `classes`." if names else ""


@functools.cache
def layouts() -> dict[str, list[str]]:
    """Of each operator with DTensor rules: the paragraphs about it in the docstring of its file. Files are parsed, because
    an import would load torch.distributed.tensor."""
    known, files = {name for name, o in operators().items() if not o.alias_of}, sorted(RULES.glob("*.py"))
    with_own_file = known & {path.stem for path in files}
    found: dict[str, list[str]] = {}
    for path in files:
        tree = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        # A file registers rules by an operator's name, or by the ending that a form has behind the name of its base.
        named = {path.stem} | strings | {path.stem + ending for ending in strings}
        served = named & (known - with_own_file | {path.stem})
        found |= {name: [] for name in served & known}
        for paragraph in (ast.get_docstring(tree) or "").split("\n\n"):
            text = re.sub(r"\s+", " ", paragraph)
            first, _, rest = text.partition(": ")
            about = set(first.split(", "))
            about, text = (about, rest) if about <= served else (served, text)
            for name in about & known:
                found[name] += [text] * bool(text)
    return found


def dtensors(operator: Operator) -> str:
    """Nothing for a form that takes the layouts of its base."""
    found = layouts().get(operator.__name__, [WITHOUT_RULES])
    if operator.base is not None and found == layouts().get(operator.base.__name__):
        return ""
    title = "**[DTensor](distributed.md#dtensor):**"
    if len(found) == 1:
        return paragraphs(f"{title} {found[0]}")
    return "\n".join([title, "", *(filled(f"- {markdown(text)}", "  ") for text in found)])


def section(operator: Operator) -> Iterator[str]:
    found, base, former = documentation(operator), operator.base, former_names(operator)
    cost = f"**Cost:** {found.cost}" if found.cost else ""
    if base is None:
        yield f"## `{operator.__name__}`"
        yield paragraphs(found.summary)
        yield signature(operator)
        yield arguments_table(operator, found)
        yield paragraphs(results(operator, found), *found.text, cost, former)
    else:
        yield f"### `{operator.__name__}`"
        described = arguments_of_form(operator, base, found)
        yield paragraphs(found.summary, described, results(operator, found), *found.text, cost, former)
    if lines := dtensors(operator):
        yield lines
    yield example(found)


def base_of_all(operator: Operator) -> Operator:
    return operator if operator.base is None else base_of_all(operator.base)


def page() -> str:
    declared = [operator for operator in operators().values() if not operator.alias_of]
    bases = [operator for operator in declared if operator.base is None]
    _, *conventions = inspect.cleandoc(reference.__doc__ or "").split("\n\n")
    index = [f"| [`{o.__name__}`](#{o.__name__}) | {markdown(documentation(o).summary)} |" for o in bases]
    parts = [
        "# Operators",
        "<!-- Generated from the declarations and DTensor rules by python -m liger_ops.aot.operators_page docs/operators.md -->",
        paragraphs(*(re.sub(r"\s+", " ", text) for text in conventions)),
        "\n".join(["| operator | computes |", "|---|---|", *index]),
        "```python\nimport torch\nfrom liger_ops.functional import *\n```",
    ]
    for base in bases:
        forms = [o for o in declared if o is not base and base_of_all(o) is base]
        for operator in [base, *forms]:
            parts += section(operator)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
