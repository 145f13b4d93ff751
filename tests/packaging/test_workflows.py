"""The workflows in .github: what a tag starts, in which order, with which rights and time limits."""

import os
import re
import subprocess

import pytest
import yaml

from liger_ops.aot import machines, torch_release
from tests.support.checks import ROOT

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
RELEASE = WORKFLOWS["release"]["jobs"]
JOBS = {f"{stem}: {name}": job for stem, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()}
READ = {"contents": "read"}


def steps_of(job: dict, key: str) -> str:
    return "\n".join(step[key] for step in job["steps"] if key in step)


def before(name: str) -> set[str]:
    """The jobs that must succeed first."""
    needs = RELEASE[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else {*needs}
    return direct.union(*map(before, direct))


def test_only_a_tag_starts_a_release():
    # YAML reads the key `on` as true.
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    assert WORKFLOWS["ci"][True] == {"push": {"branches": ["main"]}, "pull_request": None}


def test_nothing_is_published_before_everything_passed():
    assert before("publish") == {*RELEASE} - {"publish"} == {"suite", "wheel", "compare", "test", "attest"}
    assert before("attest") == {"suite", "wheel", "compare", "test"}
    assert not any("if" in job or "continue-on-error" in str(job) for job in RELEASE.values())
    assert "attest-build-provenance" in steps_of(RELEASE["attest"], "uses")
    assert "gh-action-pypi-publish" in steps_of(RELEASE["publish"], "uses")
    assert ".ci/run" in steps_of(RELEASE["suite"], "run")


def test_a_release_has_every_machine_and_torch():
    every = [*machines.MACHINES]
    for name in ("wheel", "compare", "test"):
        assert RELEASE[name]["strategy"]["matrix"]["machine"] == every, name
    assert WORKFLOWS["ci"]["jobs"]["wheel"]["strategy"]["matrix"]["machine"] == every
    assert RELEASE["test"]["strategy"]["matrix"]["torch"] == [*torch_release.RELEASES.values()]
    assert "make wheel MACHINE=${{ matrix.machine }}" in steps_of(RELEASE["wheel"], "run")


def test_wheels_know_the_repository():
    (build,) = [step for step in RELEASE["wheel"]["steps"] if "make wheel" in step.get("run", "")]
    assert build["env"] == {"LIGER_OPS_REPOSITORY": "${{ github.server_url }}/${{ github.repository }}"}


def test_the_same_wheels_are_compared_tested_and_published():
    """Each is built on two machines, and the first one is published."""
    assert RELEASE["wheel"]["strategy"]["matrix"]["build"] == ["first", "second"]
    stored = RELEASE["wheel"]["steps"][-1]["with"]["name"]
    assert stored == "wheel-${{ matrix.machine }}-${{ matrix.build }}"
    first, second = (stored.replace("${{ matrix.build }}", build) for build in ("first", "second"))
    assert steps_of(RELEASE["compare"], "run") == f"cmp {first}/*.whl {second}/*.whl"
    (tested,) = [step["with"]["name"] for step in RELEASE["test"]["steps"] if "download" in step.get("uses", "")]
    assert tested == first
    for name in ("attest", "publish"):
        fetched = RELEASE[name]["steps"][0]["with"]
        assert fetched == {
            "pattern": first.replace("${{ matrix.machine }}", "*"),
            "path": "dist",
            "merge-multiple": True,
        }


def test_the_tag_is_the_version():
    (command,) = [step["run"] for step in RELEASE["wheel"]["steps"] if step.get("name") == "The tag is the version"]
    version = re.search(r'"(.+)"', (ROOT / "liger_ops" / "_version.py").read_text())[1]
    assert ran(command, GITHUB_REF_NAME=f"v{version}") == 0
    assert ran(command, GITHUB_REF_NAME=f"v{version}.1") == 1


def ran(command: str, **env: str) -> int:
    return subprocess.run(["bash", "-ec", command], cwd=ROOT, env={**os.environ, **env}, capture_output=True).returncode


@pytest.mark.parametrize("name", JOBS)
def test_time_limits_are_above_what_a_job_takes(name):
    """A whole suite or wheel takes up to an hour on two slow cores."""
    long = any(command in steps_of(JOBS[name], "run") for command in (".ci/run", "make wheel"))
    assert JOBS[name]["timeout-minutes"] in range(120 if long else 60, 121)


@pytest.mark.parametrize("stem", WORKFLOWS)
def test_rights_are_minimal(stem):
    """Only what signs may have a token of its own, and it runs no code of this repository."""
    assert WORKFLOWS[stem]["permissions"] == READ
    more = {name: job["permissions"] for name, job in WORKFLOWS[stem]["jobs"].items() if "permissions" in job}
    wanted = {
        "attest": {"id-token": "write", "attestations": "write"},
        "publish": {"id-token": "write"},
    }
    assert more == (wanted if stem == "release" else {})
    for name in more:
        job = WORKFLOWS[stem]["jobs"][name]
        assert not steps_of(job, "run") and "checkout" not in steps_of(job, "uses")
    assert "secrets." not in (ROOT / ".github" / "workflows" / f"{stem}.yml").read_text()


def test_actions_are_pinned_by_commit():
    """A tag of an action can be moved to another commit. The version stands behind the commit."""
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    used = re.findall(r"uses: (.*)", text)
    pinned = [re.fullmatch(r"([\w-]+/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line) for line in used]
    assert len(used) > 10 and all(pinned), [line for line, found in zip(used, pinned) if not found]
    assert len({found.groups() for found in pinned}) == len({found[1] for found in pinned}), "two versions of an action"
    for job in JOBS.values():
        for step in job["steps"]:
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_workflows_call_what_exists():
    targets = {*re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)}
    commands = "\n".join(steps_of(job, "run") for job in JOBS.values())
    made = {word for line in re.findall(r"make (.*)", commands) for word in line.split("MACHINE")[0].split()}
    assert made == {"wheel", "build", "test-hub", ".venv/models"} and made <= targets
    files = re.findall(r"(?:tests|\.ci)/[\w/.]+", commands)
    assert len(files) > 4 and [name for name in files if not (ROOT / name).exists()] == []
