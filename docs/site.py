"""What the site adds to its tools.

An extension of griffe, which reads docstrings: makes Markdown of their roles and examples. A hook of mkdocs: the page of
the operators comes before others in search results.
"""

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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    if page.file.src_uri == "docs/operators.md":
        page.meta["search"] = {"boost": 2}
