"""The pages: every link leads somewhere, every block of code runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import prose
from tests.support.checks import ROOT, environment_of_tree, run_forked

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *sorted((ROOT / "benchmarks/results").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def ids(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=ids)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_figures_of_the_readme_stand_on_their_pages():
    """Thousands of tokens per second and peak GiB, before and with us, of the page that the row links to."""
    table = (ROOT / "README.md").read_text().partition("| training step |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 5
    for row in table:
        *_, before, ours, faster, link = row.strip("| ").split(" | ")
        page = (ROOT / re.search(r"\((.*)\)", link)[1]).read_text()
        measured = {
            (f"{int(tokens) / 1000:.1f}", gib): int(tokens)
            for tokens, gib in re.findall(r" \| (\d+) +\| ([\d.]+) +\|", page)
        }
        pairs = [tuple(re.findall(r"[\d.]+", cell)[-2:]) for cell in (before, ours)]
        assert {*pairs} <= {*measured}, row
        assert faster == f"{measured[pairs[1]] / measured[pairs[0]]:.2f} ×", row


def test_every_page_is_linked():
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in LINKED
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    }
    assert {*LINKED} - {ROOT / "README.md"} <= linked


def test_blocks_name_a_language_that_is_tested():
    for page in PAGES:
        assert {name for name, _ in BLOCK.findall(page.read_text())} <= {"python", "bash", "text"}, page


# Pages name a model that would have to be downloaded.
SMALL_MODEL = """
import tempfile

import transformers

small_model = tempfile.mkdtemp()
transformers.LlamaForCausalLM(
    transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2)
).save_pretrained(small_model)
load = transformers.AutoModelForCausalLM.from_pretrained
transformers.AutoModelForCausalLM.from_pretrained = lambda name, *args, **kwargs: load(small_model, *args, **kwargs)
"""


# Run after a page's blocks: code that runs may still show a wrong call.
VALUES = {
    "README.md": """
rows = x.detach()
expected = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
torch.testing.assert_close(y.detach(), expected)
assert torch.equal(norm(x), y)
torch.testing.assert_close(nn.RMSNorm(4096)(1e-3 * rows), torch.nn.RMSNorm(4096)(1e-3 * rows))
torch.testing.assert_close(loss.detach(), torch.nn.functional.cross_entropy(expected @ head.T, target))
assert report.replaced
""",
    "docs/lora.md": """
quantised = [row for row in report.rows if row.type == "Linear4bit"]
assert quantised and all(row.replacement == "lora_linear" for row in quantised), report
""",
}


def pages_with_python():
    for page in PAGES:
        if blocks(page, "python"):
            marks = [pytest.mark.kernels] * (page.name == "hub.md") + [pytest.mark.thorough] * (
                page.name != "README.md"
            )
            yield pytest.param(page, marks=marks, id=ids(page))


@pytest.mark.parametrize("page", [*pages_with_python()])
def test_python_runs(page, tmp_path):
    """A page's blocks in one process, in order, as a reader would run them."""
    code = "\n".join(blocks(page, "python"))
    script = tmp_path / "page.py"  # TorchScript reads the source from a file
    script.write_text((SMALL_MODEL if "from_pretrained" in code else "") + code + VALUES.get(ids(page), ""))
    done = run_forked(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", ["transformers"])
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"print\(.*\)  # (torch\.Size.*)$", code, re.MULTILINE):
        assert said in done.stdout


def commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := f" {line}".partition(" #")[0].strip())]


HELP = """
import runpy, sys

for command in {commands!r}:
    sys.argv[:] = [*command, "--help"]
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, command
"""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=ids)
def test_commands_exist(page, monkeypatch):
    """Commands that take minutes are run as far as their own check of arguments."""
    modules = []
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "make":
            checked = ["make", "-n", f"PYTHON={sys.executable}", *words[1:]]
        elif words[:2] == ["python", "-m"]:
            modules.append(words[2:])
            continue
        elif words[:2] == ["pip", "install"]:
            known = (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()
            assert all(word == "." or word in known or word.startswith(("-", "dist/")) for word in words[2:]), command
            continue
        else:
            # tests/packaging/test_cpp_example.py runs them.
            assert words[0] == "cmake" or words[0] == "python" and (ROOT / words[1]).exists(), command
            continue
        done = subprocess.run(checked, cwd=ROOT, env=environment_of_tree(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    if modules:  # in one process, because most import torch
        monkeypatch.chdir(ROOT)
        done = run_forked(HELP.format(commands=modules))
        assert done.returncode == 0, done.stderr


def test_prose_finds_a_habit(tmp_path):
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text("Rows are shared out.\n")
    source.write_text('x = 1  # tokens a second\nshared_out = "fine"\n')
    found = prose.findings([page, source])
    assert [re.sub(r".*/", "", line).partition(": ")[0] for line in found] == ["page.md:1", "source.py:1"]
