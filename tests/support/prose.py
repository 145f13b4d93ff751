"""Looks for the habits of wording in prose.txt, in pages and in the comments and strings of the sources.

python tests/support/prose.py [FILE ...]      default: every file that git tracks
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = Path(__file__).with_name("prose.txt")
NOT_OURS = (
    "benchmarks/results/",
    "tests/docs/test_docs.py",
    "tests/compat/liger_kernel_names.txt",
    "tests/support/prose.txt",
    "tests/ops/data/",
    "LICENSE",
)


def habits() -> list[tuple[re.Pattern[str], str]]:
    lines = [line for line in WORDS.read_text().splitlines() if line and not line.startswith("#")]
    return [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in (line.split("\t") for line in lines)]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and text: a page's lines, or the comments and strings of a source."""
    text = path.read_text()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                # Of a sentence that goes on in the next line, the words across the break are not looked at.
                yield from enumerate(token.string.splitlines(), token.start[0])
    elif path.suffix in (".cpp", ".h"):
        for number, line in enumerate(text.splitlines(), 1):
            yield number, " ".join(re.findall(r'//.*|"(?:[^"\\]|\\.)*"', line))
    elif path.suffix in (".md", ".txt", ".yml", ".toml", ".cmake") or path.name == "Makefile":
        yield from enumerate(text.splitlines(), 1)


def findings(paths: list[Path]) -> list[str]:
    known = habits()
    return [
        f"{path}:{number}: {found[0]!r}: better: {better}"
        for path in paths
        for number, line in prose_of(path)
        for pattern, better in known
        if (found := pattern.search(line))
    ]


def main() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    wanted = sys.argv[1:] or [name for name in tracked if name and not name.startswith(NOT_OURS)]
    found = findings([Path(name) if sys.argv[1:] else ROOT / name for name in wanted])
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
