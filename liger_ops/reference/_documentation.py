"""Parses the docstring of a declaration. Its paragraphs are, in this order:

- a summary;
- text, of which one paragraph begins with the tensors: ``x: (..., n), weight: (n,) in x's dtype or fp32 -> (..., n).``
  Behind a shape, a note says what the type and the defaults of the page leave open; the result follows the arrow;
- ``Cost: ...``
- examples, as doctest runs them.
"""

from __future__ import annotations

import doctest
import inspect
import re
from dataclasses import dataclass
from functools import cache

from ._operator import SCHEMA_TYPES, Operator

_SHAPES = r"\([^)]*\)(?: or \([^)]*\))*"


@dataclass
class Described:
    """A tensor argument. shapes: as written, such as "(S, R) or (1 or B, S, R)"."""

    shapes: str
    note: str

    def is_of(self, kind: str) -> bool:
        """kind: of the elements, such as "indices"; none is written for floating point."""
        return self.note.split(" ")[0] == kind


@dataclass
class Documentation:
    summary: str
    tensors: dict[str, Described]
    result: str  # its shape and dtype, if they are written
    text: list[str]  # paragraphs
    cost: str
    examples: list[doctest.Example]


def _tensors(operator: Operator) -> re.Pattern[str]:
    """One or more tensor arguments, and their shapes."""
    name = rf"\b(?:{'|'.join(n for n, kind in operator.types.items() if SCHEMA_TYPES[kind].startswith('Tensor'))})"
    return re.compile(rf"(?P<names>{name}(?:(?:, | and ){name})*): (?P<shapes>{_SHAPES})")


def _described(sentence: str, tensors: re.Pattern[str]) -> dict[str, Described]:
    found: dict[str, Described] = {}
    matches = [*tensors.finditer(sentence)]
    ends = [match.start() for match in matches[1:]] + [len(sentence)]
    for match, end in zip(matches, ends):
        note = sentence[match.end() : end].strip().removesuffix(",").removesuffix("and").strip()
        found |= dict.fromkeys(re.split(", | and ", match["names"]), Described(match["shapes"], note))
    return found


@cache
def documentation(operator: Operator) -> Documentation:
    doc, tensors = inspect.cleandoc(operator.__doc__ or ""), _tensors(operator)
    summary, *paragraphs = (re.sub(r"\s+", " ", p) for p in doc.partition(">>> ")[0].strip().split("\n\n"))
    found = Documentation(summary, {}, "", [], "", doctest.DocTestParser().get_examples(doc))
    for paragraph in paragraphs:
        if paragraph.startswith("Cost: "):
            found.cost = paragraph.removeprefix("Cost: ")
            continue
        if not found.tensors and tensors.match(paragraph):
            sentence, _, paragraph = paragraph.partition(". ")
            sentence, _, found.result = sentence.removesuffix(".").partition(" -> ")
            found.tensors = _described(sentence, tensors)
        if paragraph:
            found.text.append(paragraph)
    return found
