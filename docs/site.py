"""An extension of griffe, which reads docstrings for the site: makes Markdown of their roles and examples."""

import re
from typing import Any

import griffe


def markdown(text: str) -> str:
    text = re.sub(r":\w+:(?=`)", "", text)
    # An example begins with a prompt and ends with the paragraph.
    return re.sub(
        r"^>>> (?:.|\n)*?(?=\n\n|\Z)", lambda example: f"```pycon\n{example[0]}\n```", text, flags=re.MULTILINE
    )


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
