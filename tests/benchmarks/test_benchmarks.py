"""`python -m benchmarks`: results, reports, comparison and tuning."""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread

from benchmarks import __main__ as main
from benchmarks import (
    clock,
    compare,
    expert_parallel,
    fp8_curves,
    harness,
    loss_curves,
    machine,
    pages,
    plots,
    report,
    training,
    tune,
)
from benchmarks import records as files
from benchmarks.arguments import add_out
from benchmarks.harness import in_turn
from benchmarks.op import Anchor, Host
from benchmarks.providers import PROVIDERS, discover, op_of
from liger_ops.kernels import find
from tests.support.checks import environment_of_tree, output_of, successful
from tests.support.host import stub_cuda
from tests.support.host.programs import output_of_program
from tests.support.host.stub_cuda import ROOT


@pytest.mark.thorough
def test_a_suite_writes_records_a_table_and_plots(tmp_path):
    ops = ["swiglu"]
    providers = ["torch", "hf", "liger-kernel", "ours"]
    asked = f"--device cpu --suite quick --rounds 1 --ops {','.join(ops)} --providers {','.join(providers)}"
    # It records how it was started.
    command = [sys.executable, "-m", "benchmarks", *asked.split(), "--out", tmp_path]
    page = successful(subprocess.run(command, cwd=ROOT, env=environment_of_tree(), capture_output=True, text=True))
    (lines,) = tmp_path.glob("*.jsonl")
    machine, *records = map(json.loads, lines.read_text().splitlines())
    assert machine["cpu"] and machine["torch"] and str(ROOT) not in lines.read_text()
    times = [r for r in records if r["kind"] == "time"]
    assert {(r["op"], r["provider"]) for r in times} >= {(op, p) for op in ops for p in ("hf", "ours")}
    assert all(
        r["median"] > 0 and r["floor"] > 0 and r["path"] == ("cpu" if r["provider"] == "ours" else "") for r in times
    )
    assert {r["kind"] for r in records} >= {"ceiling", "time", "memory", "host"}
    # Providers that cannot run are recorded, not dropped.
    missing = {r["provider"] for r in records if r["kind"] == "absent"}
    assert "liger-kernel" in missing or any(r["provider"] == "liger-kernel" for r in times)
    assert page == lines.with_suffix(".md").read_text() + "\n" and "Peak memory" in page
    assert [p.name for p in tmp_path.glob("*.png")] == [f"{lines.stem}-time-memory.png"]


def boom(*_):
    raise RuntimeError("\x1b[91m\x1b[1mboom\x1b[0m in /some/where/file.py\nand more")


SMALL = replace(
    op_of("swiglu"),
    shapes={"quick-cpu": [(4, 64)]},
    anchors=(Anchor((4, 64), "float32", {"forward": 1e9}, {"full": 1e9}, device="cpu"),),
    host={"cpu": Host((4, 64), "float32", {"grad": 1e9})},
)
BROKEN = {
    "nothing": (SMALL, 0),
    "a peer": (replace(SMALL, providers=dict(SMALL.providers, quack=lambda: boom)), 0),
    "ours": (replace(SMALL, providers=dict(SMALL.providers, ours=lambda: boom)), 1),
    "every provider": (replace(SMALL, formula=boom), 1),
}


@pytest.mark.parametrize("suite", ["quick", "anchors"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_run_fails_if_ours_or_every_provider_fails(broken, suite, tmp_path, monkeypatch):
    monkeypatch.setattr(clock.CpuClock, "ceiling_bytes", 1 << 20)
    monkeypatch.setattr(report, "draw", lambda *_: ([], "No plots."))
    op, expected = BROKEN[broken]
    asked = f"--suite {suite} --device cpu --rounds 1 --providers hf,quack,ours --out {tmp_path}".split()
    assert main.run(main.parse(asked, {"swiglu": op}), {"swiglu": op}) == expected
    (lines,) = tmp_path.glob("*.jsonl")
    records = list(map(json.loads, lines.read_text().splitlines()))
    crashes = {r["reason"] for r in records if r["kind"] == "absent" and r["state"] == "crashed"}
    assert crashes == (set() if broken == "nothing" else {"crashed: RuntimeError: boom in …"})
    bars = [r for r in records if r["kind"] == "bar"]
    verdict = "NOT MEASURED" if expected else "pass"
    judged = {} if suite == "quick" else dict.fromkeys(("time", "memory", "host"), verdict)
    assert {bar["of"]: bar["verdict"] for bar in bars} == judged


def test_shapes_selects_shapes_of_a_suite(tmp_path, monkeypatch):
    monkeypatch.setattr(clock.CpuClock, "ceiling_bytes", 1 << 20)
    monkeypatch.setattr(report, "draw", lambda *_: ([], "No plots."))
    ops = {"swiglu": replace(SMALL, shapes={"quick-cpu": [(2, 64), (4, 64), (8, 64)]})}
    asked = f"--suite quick --device cpu --rounds 1 --providers ours --out {tmp_path} --shapes".split()
    assert main.run(main.parse([*asked, "8x64", "2x64"], ops), ops) == 0
    (lines,) = tmp_path.glob("*.jsonl")
    assert {(r["kind"], *r["shape"]) for r in report.read(lines) if "op" in r} == {
        (kind, rows, 64) for kind in ("time", "memory") for rows in (2, 8)
    }


def test_bars_of_errors_name_results():
    for name, op in discover().items():
        if op.must_error:
            inputs = op.inputs(harness.Make("cpu", torch.float32), *op.shapes["quick-cpu"][0])
            assert set(op.must_error) <= {f"d {k}" for k in inputs if k not in op.constants}, name


def test_the_ceiling_of_a_cpu_is_that_of_fp32(monkeypatch):
    monkeypatch.setattr(clock.CpuClock, "ceiling_bytes", 1 << 20)
    with torch.profiler.profile(record_shapes=True) as profile:
        record = clock.measure_ceilings(clock.CpuClock(), with_matmul=True)
    (products,) = {tuple(e.input_dtypes[:2]) for e in profile.events() if e.name == "aten::mm"}
    assert products == ("float", "float") and record["matmul_dtype"] == "float32" and record["matmul_tflop_s"] > 0


WARM = """
from torch._dynamo.utils import counters
from benchmarks import warm
from benchmarks.harness import Case, Problem
from benchmarks.providers import discover, load
op, ticks = discover()["swiglu"], []
case = Case("swiglu", op, (4, 64), "float32")
warm.compile_ahead([case], "cpu", 1, ticks.append)
Problem(case, "cpu").results(load(op, warm.PROVIDER))
print(ticks, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.thorough
def test_warm_compilation_fills_inductors_cache(tmp_path):
    output = output_of(WARM, PYTHONPATH=str(ROOT), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert output.split()[-2:] == ["2", "0"] and "compiled swiglu 4×64" in output


def result(path, kind="time", **medians):
    machine = {"kind": "machine", "device": "cpu", "cpu": "one", "suite": "quick", "providers": ["ours"], "rounds": 1}
    case = {"kind": kind, "unit": "us", "shape": [4, 8], "dtype": "float32", "pass": "full", "provider": "ours"}
    spread = lambda m: {"median": m, "q1": m - 1, "q3": m + 1, "samples": 5}  # noqa: E731
    records = [machine, *({**case, "op": op, **spread(median)} for op, median in medians.items())]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


@pytest.mark.parametrize("count", range(1, 14))
def test_every_provider_follows_every_other_equally_often(count):
    names = [str(i) for i in range(count)]
    rounds = count if count % 2 == 0 else 2 * count
    turns = [in_turn(names, turn) for turn in range(rounds)]
    assert all(sorted(turn) == sorted(names) for turn in turns)
    follows = Counter(pair for turn in turns for pair in zip(turn, turn[1:]))
    assert follows == {(a, b): rounds // count for a in names for b in names if a != b}


def test_compare_flags_changes_beyond_the_spread(tmp_path, capsys):
    before = result(tmp_path / "a", same=10, near=10, slower=10, faster=10)
    after = result(tmp_path / "b", same=10, near=11.5, slower=13, faster=7)
    assert compare.main([before, after]) == 1
    out = capsys.readouterr().out
    assert "1 regressions" in out and "near" not in out
    assert [line.split("|")[-2].strip() for line in out.splitlines() if "4×8" in line] == ["REGRESSION", "better"]
    assert compare.main([before, before]) == 0
    assert compare.main([before, result(tmp_path / "c", same=10, near=10, slower=10)]) == 1
    assert "Not in every file" in capsys.readouterr().out


@pytest.mark.parametrize("kind, drift", [("time", 1.05), ("memory", 1.05), ("host", 1.1), ("cold start", 1.1)])
def test_compare_ignores_drift_between_runs(kind, drift, tmp_path, capsys):
    before = result(tmp_path / "a", kind, within=1000, beyond=1000)
    after = result(tmp_path / "b", kind, within=1000 * (drift - 0.01), beyond=1000 * (drift + 0.01))
    assert [compare.main(pair) for pair in ([before, after], [after, before])] == [1, 0]
    rows = [line.replace(" ", "").split("|") for line in capsys.readouterr().out.splitlines() if "4×8" in line]
    assert [[row[2], row[-2]] for row in rows] == [["beyond", "REGRESSION"], ["beyond", "better"]]


def test_compare_of_several_pairs_wants_a_difference_in_each(tmp_path, capsys):
    before = result(tmp_path / "a", same=10, once=10, slower=10)
    first = result(tmp_path / "b", same=10, once=20, slower=20)
    second = result(tmp_path / "c", same=10, once=5, slower=15)
    assert compare.main([before, first, before, second]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "4×8" in line]
    assert "slower" in row and "1.500×" in row and "REGRESSION" in row
    with pytest.raises(SystemExit, match="2"):
        compare.main([before, first, before])
    assert "files come in pairs, BEFORE and AFTER (got 3)" in capsys.readouterr().err


def test_compare_refuses_an_empty_comparison(tmp_path, capsys):
    before, nothing = result(tmp_path / "a", same=10), result(tmp_path / "b")
    for arguments in ([before, before, "--provider", "our"], [nothing, before]):
        with pytest.raises(SystemExit, match="2"):
            compare.main(arguments)
        assert "error: --provider must be a provider in" in capsys.readouterr().err
    assert compare.main([before, nothing]) == 1


@pytest.mark.parametrize("text", [None, "", "no record", '{"kind": "time"}'])
@pytest.mark.parametrize("command", ["report {0}", "compare {0} {0}", "gemm --fit {0}"])
def test_files_without_records_are_named(command, text, tmp_path):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="must be a file of records|must begin with the record of a machine"):
        main.main(command.format(path).split())


def test_curves_in_fp8(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", f"_ --device cpu --steps 3 --seeds 2 --out {tmp_path}".split())
    assert fp8_curves.main() == 0
    (file,) = tmp_path.glob("*-fp8-curves.json")
    record = json.loads(file.read_text())
    assert [set(curves) for curves in record["curves"]] == 2 * [{"bf16", "rows", "rows_hp", "tensor"}]
    for curves in record["curves"]:
        # It is in FP8, and near bf16.
        assert curves["rows"] != curves["bf16"] != curves["rows_hp"] and curves["rows"][0] != curves["rows"][2]
        assert all(abs(a / b - 1) < 0.01 for a, b in zip(curves["rows"], curves["bf16"]))
    assert "within 0.5%" in capsys.readouterr().out and file.with_suffix(".png").exists()


REFUSED = [
    (main.main, "--rounds 0"), (main.main, "--rounds -1"), (main.main, "--warm 0"),
    # float64 is the oracle.
    (main.main, "--dtypes float64"),
    (main.main, "--ops swiglu --shapes 16x1024 17x1024"), (main.main, "--shapes 16xa"), (main.main, "tune swiglu --shapes 0x8"),
    (main.main, "tune swiglu --top 0"),
    (loss_curves.main, "--orders 0"), (loss_curves.main, "--steps 0"), (fp8_curves.main, "--providers fp4"),
    (training.main, "--steps 0"), (training.main, "--batches 8 0"), (training.main, "--length -1"),
]  # fmt: skip


@pytest.mark.parametrize("command, arguments", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_values_are_refused(command, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        command(*[arguments.split()] if command is main.main else [])
    assert re.search(r"error: .*must be (1 or more|among)", capsys.readouterr().err)


@pytest.mark.thorough
def test_experts_over_two_processes(tmp_path):
    options = ["--tiny", "--device", "cpu", "--out", tmp_path]
    output_of_program("benchmarks.expert_parallel", *options, processes=2)
    machine, *records = map(json.loads, (tmp_path / "expert-parallel.jsonl").read_text().splitlines())
    assert machine["kind"] == "machine" and [r["provider"] for r in records] == [*expert_parallel.CASES]
    assert all(r["ms"] > 0 and r["peak_bytes"] > 0 for r in records)
    # The script fails if an error is above its limit.
    assert [r["provider"] for r in records if "error" not in r] == ["no communication"]
    assert all(r["provider"] in (tmp_path / "expert-parallel.md").read_text() for r in records)


def test_many_shapes_become_a_heat_map_and_slow_cells_are_listed(tmp_path):
    providers = {"torch": 2.2, "ours": 2.0, "ours linear": 1.0}
    records = [
        {"kind": "machine", "device": "cpu", "cpu": "one", "suite": "full", "providers": [*providers], "rounds": 1}
    ]
    for rows in (1, 16, 128, 1024, 65536):
        for n in (512, 1024, 2048, 4096):
            for provider, median in providers.items():
                case = {"op": "rms_norm", "shape": [rows, n], "dtype": "float32", "provider": provider, "path": "cpu"}
                if (rows, n, provider) == (16, 512, "torch"):
                    median = 1.0
                floor = 1.9 if n < 4096 else 1.0
                times = {"median": median, "q1": median, "q3": median, "samples": 3, "floor": floor, "unit": "us"}
                times["bytes"] = 8 * rows * n
                records += [{"kind": "time", **case, "pass": name, **times} for name in ("forward", "full")]
    page = report.write(records, tmp_path / "grid")
    assert imread(tmp_path / "grid-bandwidth.png").std() > 0.1  # not blank
    slow, lost = page.split("## Slow cases")[1].split("\n\n")[1:5:2]
    assert slow == (
        "6 of the 8 cases that move more than 64 MiB reach 90 % of the copy bandwidth. Below 90 % of the copy bandwidth:"
    )
    copies = {"kind": "copies", "us": [[64 << 20, 1.0], [256 << 20, 1.5]]}
    with_copies = report.write([*records, copies], tmp_path / "copies")
    assert "A copy that moves 64 MiB takes 1.00 µs and reaches only 38 % of the copy bandwidth." in with_copies
    assert "Compared with copies of the same size, 6 cases reach 90 %." in with_copies
    assert lost == "In 38 of 40 cases no peer is faster by more than the spread. The other cases, µs:"
    named = [line.replace(" ", "") for line in page.splitlines() if line.startswith("| rms_norm")]
    assert "|rms_norm|65536×4096|float32|full|50|" in named
    assert "|rms_norm|16×512|float32|forward|2.00|torch1.00|" in named
    named = [line.replace(" ", "") for line in with_copies.splitlines() if line.startswith("| rms_norm")]
    # 2 GiB: eight times what the largest copy moved.
    assert "|rms_norm|65536×4096|float32|forward|50|600|" in named


def machine_of(suite):
    return {"kind": "machine", "device": "cpu", "cpu": "one", "providers": ["ours"], "rounds": 1, "suite": suite}


def measured(op, shapes, passes=("forward", "full"), providers=("ours",), **facts):
    common = dict(op=op, dtype="float32", path="cpu", unit="us", bytes=1 << 30, samples=3, floor=1.0)
    common |= dict(median=2.0, q1=2.0, q3=2.0, **facts)
    return [
        {"kind": kind, "shape": shape, "provider": provider, "pass": name, **common}
        for provider in providers for name in passes for shape in shapes for kind in ("time", "memory")
    ]  # fmt: skip


NORMS = [[rows, 512] for rows in (1, 16, 128)]
LINEAR = [[tokens, 64, classes] for tokens in (1024, 4096, 16384) for classes in (1000, 32768, 65536)]
PICTURES = {
    "dots, one pass of an op alone": (
        "anchors", measured("rms_norm", [[rows, 512] for rows in range(1, 41)]) + measured("cross_entropy_", NORMS, ["full"]),
        "time",
    ),
    "bars": ("anchors", measured("rms_norm", NORMS, providers=["torch", "ours", "ours compact"]), "time-memory"),
    "lines": ("paper", measured("rms_norm", NORMS) + measured("swiglu", NORMS), "time-memory"),
    "a sweep": ("full", measured("fused_linear_cross_entropy", LINEAR, least=1.0), "time-memory"),
    "a heat map": (
        "full", measured("rms_norm", [[rows, 512] for rows in range(1, 21)]) + measured("cross_entropy_", NORMS, ["full"]),
        "bandwidth",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_suits_the_suite(kind, tmp_path):
    suite, records, name = PICTURES[kind]
    report.write([machine_of(suite), *records], tmp_path / "run")
    assert [p.name for p in tmp_path.glob("*.png")] == [f"run-{name}.png"]
    assert 5_000 < (tmp_path / f"run-{name}.png").stat().st_size < 80_000


def test_a_page_shows_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "benchmarks", "--suite", "quick", "--out", "folder"])
    records = [machine.describe("cpu") | machine_of("quick"), *measured("rms_norm", NORMS)]
    assert "Made by `python -m benchmarks --suite quick`." in report.write(records, tmp_path / "run")


def test_every_provider_of_an_op_is_measured():
    assert {name for op in discover().values() for name in op.providers} <= {*PROVIDERS}


def test_every_provider_has_a_color():
    names = [*PROVIDERS, *training.PROVIDERS.values()]
    assert len({plots.color(name) for name in names}) == len({plots.SAME_COLOR.get(name, name) for name in names})


def test_a_run_of_training_is_drawn_again(tmp_path):
    path = tmp_path / "training.jsonl"
    numbers = dict(batch=8, length=64, layers=2, tokens_per_second=9.0, peak_gib=1.5, first_step_seconds=1.0)
    record = {"kind": "training", "model": "llama", "losses": [1.0], **numbers}
    records = [machine_of(None), *({**record, "provider": provider} for provider in ("hf", "ours-compile"))]
    path.write_text("\n".join(map(json.dumps, records)))
    main.main(["report", str(path)])
    assert "ours + torch.compile" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").stat().st_size > 5_000


def test_labels_of_training():
    plain = {"model": "llama", "adapters": "float32", "rank": 16, "targets": "all-linear", "dropout": 0.0}
    labels = {
        "llama, checkpointing": {"model": "llama", "checkpointing": True},
        "llama, float32 adapters of rank 16": plain,
        "llama, float32 adapters of rank 16, nf4 base, checkpointing": plain | {"base": "nf4", "checkpointing": True},
        "llama, frozen, without adapters, int8 base": plain | {"adapters": "none", "base": "int8"},
    }
    assert [training.model_of(record) for record in labels.values()] == [*labels]


def test_quantised_weights_are_not_trained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training", "--base", "nf4"])
    with pytest.raises(SystemExit, match="2"):
        training.main()
    assert "--base needs --adapters" in capsys.readouterr().err


@pytest.mark.thorough
def test_quantised_bases_train(tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    command = "--tiny --models llama --providers hf,ours --adapters float32 --checkpointing --steps 1 --device cpu"
    output_of_program("benchmarks.training", *command.split(), "--base", "nf4", "--out", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()][1:]
    assert [r["provider"] for r in records] == ["hf", "ours"]
    assert not [r["error"] for r in records if "error" in r]
    assert training.loss_gap(records[1], records) < 1e-3


def test_written_records_are_read_back(tmp_path):
    written = [machine_of("full"), {"kind": "time", "median": 14.505310000000001, "us": [[1, 2.5]], "bytes": None}]
    files.write(written, tmp_path / "run.jsonl")
    assert files.read(tmp_path / "run.jsonl") == [written[0], written[1] | {"median": 14.50531}]


def run_of(path, median, shapes, providers=("ours",)):
    times = {"q1": median, "q3": median, "samples": 3, "floor": 1.0, "unit": "us", "path": "cpu", "median": median}
    common = {"op": "swiglu", "dtype": "float32", "provider": "ours"} | times
    records = [machine_of("full") | {"providers": [*providers]}, {"kind": "ceiling", "copy_gb_s": median}]
    for kind in ("time", "memory"):
        records += [{"kind": kind, "shape": shape, "pass": "forward", **common} for shape in shapes]
    records.append({"kind": "host", "shape": [1, 8], "pass": "grad", **common})
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_report_merges_the_cases_of_two_runs(tmp_path):
    old = run_of(tmp_path / "old.jsonl", 2.0, [[1, 8], [2, 8]])
    new = run_of(tmp_path / "new.jsonl", 3.0, [[2, 8], [3, 8]], ["torch", "ours"])
    main.main(["report", str(old), "--add", str(new)])
    found = report.read(old)
    assert found[0]["providers"] == ["ours", "torch"]
    medians = {(r["kind"], *r["shape"]): r["median"] for r in found if "op" in r}
    expected = {
        (kind, rows, 8): median for kind in ("time", "memory") for rows, median in ((1, 2.0), (2, 3.0), (3, 3.0))
    }
    assert medians == expected | {("host", 1, 8): 2.0}
    assert len(found) == 2 + len(medians)
    assert len(report.read(new)) == 7


def test_handwritten_sections_survive_a_new_report(tmp_path):
    result, page = run_of(tmp_path / "run.jsonl", 2.0, [[1, 8]]), tmp_path / "run.md"
    main.main(["report", str(result)])
    plain = page.read_text()
    words = f"{pages.BY_HAND}\n\n## Why\n"
    page.write_text(f"Another run's page.\n\n{words}")
    for _ in range(2):
        main.main(["report", str(result)])
        assert page.read_text() == f"{plain}\n{words}"


# ---- tune


class FakeHost:
    """A smaller BLOCK_M is faster; configs with sixteen warps compute wrong results."""

    def __init__(self):
        self.chosen, self.checked, self.restored = None, [], 0

    def time(self, name, run):
        config = self.chosen or find(name).configs[0]
        return config.constexprs["BLOCK_M"] + config.num_warps / 100

    def compile(self, variants, configs):
        return ["too large" if c.constexprs["BLOCK_M"] > 64 else None for c in configs]

    def choose(self, variants, config):
        self.chosen = config

    def restore(self, name):
        self.chosen = None
        self.restored += 1

    def check(self):
        self.checked.append(self.chosen)
        if self.chosen.num_warps == 16:
            raise harness.WrongResult("no sixteen")


@pytest.fixture(scope="module")
def tuned():
    host, log = FakeHost(), []
    variants = [find("column_sum").variant(0)]
    found = tune.climb(host, variants, lambda: None, host.check, log.append)
    assert host.chosen is None and host.restored == len(host.checked)
    return SimpleNamespace(host=host, log=log, found=found, configs=[tune.row(c) for _, c in found])


def test_tuning_starts_from_the_table_and_climbs(tuned):
    assert tuned.configs[0] == "Config(8192, True, 8, constexprs=dict(BLOCK_M=64, BLOCK_N=16))"
    near = {f"Config(8192, True, {w}, constexprs=dict(BLOCK_M={m}, BLOCK_N={n}))"
            for w, m, n in ((4, 64, 16), (8, 32, 16), (8, 64, 8), (8, 64, 32), (8, 32, 32))}  # fmt: skip
    assert near <= set(tuned.configs) and len(set(tuned.configs)) == len(tuned.configs)
    assert min(tuned.found, key=lambda pair: pair[0])[1].constexprs["BLOCK_M"] <= 64 >> tune.STEPS


def test_tuning_drops_candidates_with_wrong_results(tuned):
    assert not any("True, 16," in config for config in tuned.configs)
    refused = [line for line in tuned.log if line.endswith("no sixteen")]
    assert refused and len(tuned.host.checked) == len(tuned.configs) - 1 + len(refused)
    assert any(line.endswith(": too large") for line in tuned.log) and len(tuned.log) > len(tuned.host.checked)


OP = SimpleNamespace(kernels_must={}, traffic=lambda size, rows, n: (2 * rows * n * size, 2 * n * size))
CASE = SimpleNamespace(op=OP, shape=(40, 96), dtype="float32", torch_dtype=torch.float32)


def test_tuning_proposes_a_config_or_keeps_the_current_one(tuned):
    fast = [(t if i else 1e9, c) for i, (t, c) in enumerate(tuned.found)]
    slow = [(t if i else 0.0, c) for i, (t, c) in enumerate(tuned.found)]
    proposed = tune.proposal("column_sum", CASE, fast, "a GPU", 3)[-1]
    assert proposed.startswith("  propose: Config(8192, True, ") and "(was 1000000000.0), a GPU" in proposed
    assert tune.proposal("column_sum", CASE, slow, "a GPU", 3)[-1].startswith("  keep it")


def test_kernel_bandwidth_uses_the_bytes_that_the_op_moves(monkeypatch):
    moved = (2 * 40 * 96 + 2 * 96) * 4
    row = f"| column_sum | 40×96 | float32 | {moved / 4e3:.1f} | 20.0 | {100 * moved / 4e3 / 20:.1f} % |"
    assert tune.measurement("column_sum", CASE, 20.0, 4.0) == (f"{row}  |", True)
    monkeypatch.setitem(OP.kernels_must, "column_sum", 0.3)
    assert tune.measurement("column_sum", CASE, 20.0, 4.0) == (f"{row} ≥ 30 %: pass |", True)
    monkeypatch.setitem(OP.kernels_must, "column_sum", 0.5)
    assert tune.measurement("column_sum", CASE, 20.0, 4.0) == (f"{row} ≥ 50 %: FAIL |", False)


def test_tuning_changes_keep_by_whole_tiles():
    from liger_ops.kernels.losses.cross_entropy import part_config

    kernel = find("cross_entropy_fwd_bwd")
    least = min(c.constexprs["SHARE"] for c in kernel.configs if c.constexprs["SHARE"])
    assert tune.smallest_share(kernel) == least and tune.smallest_share(find("rms_norm_fwd")) == 0
    start = part_config(None, 17408, 128, 1, aligned=False, programs_per_sm=6)
    found = list(tune.neighbours(start, least))
    kept = [(c.constexprs["KEEP"], c.constexprs["TILES"], c.programs_per_sm) for c in found]
    # One tile more, one tile less, two tiles per step (rounded up), and one resident program less for one tile more.
    assert {(18432, 1, 6), (16384, 1, 6), (18432, 2, 6), (18432, 1, 5)} <= set(kept)
    for config in found:
        c = config.constexprs
        assert c["SHARE"] == c["KEEP"] and c["KEEP"] % (c["LANES"] * c["TILES"] * 8) == 0
    small = part_config(None, least, 128, 1, aligned=False, programs_per_sm=6)
    assert all(c.constexprs["SHARE"] >= least for c in tune.neighbours(small, least))


def test_tuning_turns_switches_on_and_off():
    for config in find("rms_norm_fwd").configs:
        for name in ("EARLY", "AHEAD"):
            found = {c.constexprs[name] for c in tune.neighbours(config)}
            assert found == {0, 1}, (name, config)


@pytest.mark.gpu
def test_tuning_on_a_gpu():
    page = output_of_program("benchmarks", "tune", "rms_norm", "--shapes", "64x512", "--kernels", "rms_norm_fwd")
    assert page.startswith("rms_norm_fwd, 64x512 bfloat16, ") and ("keep it" in page or "propose: Config(" in page)
    page = output_of_program(
        "benchmarks", "tune", "rms_norm", "--shapes", "64x512", "--kernels", "rms_norm_fwd", "--as-is"
    )
    assert re.search(r"\n\| rms_norm_fwd \| 64×512 \| bfloat16 \| [\d.]+ \| [\d.]+ \| [\d.]+ % \|  \|\n", page)


def tune_on_the_stub():
    tables()
    from dataclasses import replace
    from types import SimpleNamespace

    from benchmarks import tune
    from liger_ops.kernels import find

    kernel = find("column_sum")
    variant = kernel.variant(0)
    host = tune.Host(runtime, 0, 90, SimpleNamespace(flushes=0), jobs=1)
    points = [variant, kernel.variant(len(kernel.configs))]
    refused = host.compile(points, [replace(variant.config, constexprs=dict(BLOCK_M=3, BLOCK_N=16))])
    host.choose(points, replace(variant.config, num_warps=2))
    around = []
    runtime.watch("column_sum", lambda: around.append(len(calls("cuLaunchKernel"))), lambda: around.append("after"))
    for point in (0, 1):
        launch("column_sum", variant=runtime.TRIAL + point, grid=(4, 2, 1))
    runtime.watch("column_sum", None)
    try:
        launch("column_sum", variant=runtime.TRIAL + 2, grid=(4, 2, 1))
    except RuntimeError as error:
        refused.append(str(error))
    host.restore("column_sum")
    of_one_config = 0, 2 * len(kernel.configs)
    launched = host.launched(lambda: [launch("column_sum", variant=v) for v in (*of_one_config, 1)])
    indices = {name: [[v.index for v in vs] for vs in groups] for name, groups in launched.items()}
    return [refused, around, indices == {"column_sum": [[*of_one_config], [1]]}, calls("cuLaunchKernel")]


@pytest.mark.thorough
def test_tuning_launches_candidates_through_the_runtime():
    (refused, around, launched, (*tried, _, _, stock)), _ = stub_cuda.run(tune_on_the_stub)
    assert "power of 2" in refused[0] and "not compiled for this point" in refused[1]
    assert around == [0, "after", 1, "after"] and launched
    for call in tried:
        assert (call["symbol"], call["grid"], call["threads"]) == ("column_sum_kernel", "4,2,1", "64,1,1")
    assert len(tried) == 2 and stock["threads"] == "256,1,1"


def test_kernel_times_of_a_step_are_summed_by_name():
    ran = [("product", 2000.0), ("add", 0.5), ("product", 4000.0), ("norm", 30.0)] * 3
    kernels = training.by_name(ran, 3)
    assert kernels == [("product", 2, 6.0), ("norm", 1, 0.03), ("add", 1, 0.0005)]
    record = {"model": "llama", "batch": 8, "provider": "ours", "kernels": kernels}
    text = training.kernel_table(record)
    assert "llama, batch 8, ours: kernels of a step, 6.0 ms" in text
    assert "| product | 2     | 6.00 |" in text and "norm" in text and "add" not in text
    assert training.kernel_table(record | {"kernels": None}) == ""


def test_the_kernels_option_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["training", "--kernels", "--device", "cpu"])
    with pytest.raises(SystemExit):
        training.main()
    assert "--kernels needs a GPU" in capsys.readouterr().err


def test_results_go_to_an_ignored_folder_by_default():
    parser = argparse.ArgumentParser()
    add_out(parser)
    out = parser.parse_args([]).out / "a-run.jsonl"
    assert subprocess.run(["git", "check-ignore", "-q", out], cwd=ROOT).returncode == 0
    naming = [path.name for path in (ROOT / "benchmarks").glob("*.py") if '"--out"' in path.read_text()]
    assert naming == ["arguments.py"]


@pytest.mark.parametrize("load", [0.1, 3.25])
def test_a_busy_machine_is_flagged(load, monkeypatch, capsys):
    from benchmarks import machine

    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    found, said = machine.describe("cpu"), capsys.readouterr().err
    assert ("busy: other programs used 3.2 of " in found.get("load", "")) == (load > 1) == ("warning: busy" in said)
