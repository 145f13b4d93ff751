"""The choice of tiles for GEMMs: the table, tested on a stub cuBLAS, and the measurements that it was fitted to."""

import ctypes
import json
from collections import Counter
from functools import partial

import pytest

from benchmarks import gemm
from benchmarks.records import read
from tests.support.host import stub_cuda
from tests.support.host.stub_cuda import ROOT

# ---- The table on a stub cuBLAS.


def serve(problems, loaded=True):
    """Whether each GEMM was served, the GEMMs that the stub recorded, and the number of cuBLAS handles."""
    if loaded:
        from ctypes import CDLL, c_char_p

        lt = CDLL("libcublasLt.so.13")  # as torch would
    served = [runtime.multiply(**problem) for problem in problems]
    if not loaded:
        return served
    lt.stub_lt_record.restype = c_char_p
    assert runtime.gemms() == sum(map(bool, served))
    return served, json.loads(f"[{lt.stub_lt_record().decode().rstrip(',')}]"), lt.stub_lt_handles()


def gemm_of(transpose_a, transpose_b, m, n, k, **options):
    return dict(bf16=True, transpose_a=transpose_a, transpose_b=transpose_b, m=m, n=n, k=k) | options


LOGITS = gemm_of(True, False, 128256, 4096, 4096)
D_INPUT = gemm_of(False, False, 4096, 4096, 128256)
D_WEIGHT = gemm_of(False, True, 4096, 128256, 1024)
# 320x128, 256x128, 128x256, 176x128, 128x160 (all in clusters of 2), 128x128 with split-k 2 (twice) and without
PROPOSALS = "248:5:1:4;24:5:1:4;23:3:1:4;201:5:1:4;29:3:1:0;20:3:2:9999999;20:3:2:16;20:3:1:0"


def run(function, *arguments, **env):
    """In a process with stubs of the driver and of cuBLAS."""
    folders = f"{stub_cuda.driver_folder()}:{stub_cuda.cublas_folder()}"
    return stub_cuda.run(function, *arguments, **{"LD_LIBRARY_PATH": folders, "STUB_LT_PROPOSALS": PROPOSALS} | env)


def run_stub(*problems, loaded=True, **env):
    return run(serve, problems, loaded, **env)


def test_the_table_chooses_among_the_proposals():
    (served, ran, handles), log = run_stub(LOGITS, D_INPUT, D_WEIGHT, LOGITS | {"beta": 1.0})
    assert served == [True] * 4 and handles == 1 and not log
    # 176x128 for logits, 128x128 without split-k for d input, 128x160 for d weight.
    assert [r["place"] for r in ran] == [3, 7, 4, 3]
    assert [r["workspace"] for r in ran] == [[1024, 4], [1024, 0], [1024, 0], [1024, 4]]
    logits, d_input, d_weight, again = ran
    assert logits["transposed"] == [1, 0] and d_input["transposed"] == [0, 0] and d_weight["transposed"] == [0, 1]
    bf16 = 14
    assert logits["a"] == [bf16, 4096, 128256, 4096] and logits["b"] == [bf16, 4096, 4096, 4096]
    assert logits["c"] == [bf16, 128256, 4096, 128256]
    assert d_weight["a"] == [bf16, 4096, 1024, 4096] and d_weight["b"] == [bf16, 128256, 1024, 128256]
    assert again == logits | {"beta": 1} and logits["alpha"] == 2 and logits["beta"] == 0
    assert logits["addresses"] == [256, 512, 768] and logits["stream"] == 5


# Too few tiles to fill the chip, so that cuBLAS may split the sum.
NARROW = gemm_of(True, False, 2048, 512, 32768)


@pytest.mark.parametrize(
    "given,proposals,place",
    [
        (NARROW, "77:1:2:16;78:1:3:4096;79:1:1:0;80:1:1:0", 2),
        (NARROW, "77:1:1:8192;78:1:0:0", 1),
        (NARROW, "77:1:2:16", None),
        # Enough tiles.
        (NARROW | {"n": 8192}, "77:1:2:16;79:1:1:0", None),
    ],
    ids=["split-k first", "too much memory", "split-k only", "many tiles"],
)
def test_gemms_with_few_tiles_do_not_use_split_k(given, proposals, place):
    (served, ran, _), log = run_stub(given, STUB_LT_PROPOSALS=proposals)
    assert served == [None if place is None else True]
    assert [r["place"] for r in ran] == ([] if place is None else [place]) and not log


def serve_in_new_threads(problem, count):
    from ctypes import CDLL, c_char_p

    lt = CDLL("libcublasLt.so.13")
    for _ in range(count):
        worker = threading.Thread(target=lambda: runtime.multiply(**problem))
        worker.start()
        worker.join()
    lt.stub_lt_record.restype = c_char_p
    return json.loads(f"[{lt.stub_lt_record().decode().rstrip(',')}]"), calls("error")


def test_threads_without_a_context():
    """The first thread makes the plan, the second one finds it."""
    ran, errors = run(serve_in_new_threads, LOGITS, 2).value
    assert [r["device"] for r in ran] == [0, 0] and not errors


@pytest.mark.parametrize(
    "what,given,env",
    [
        ("a small GEMM", LOGITS | {"m": 1024, "n": 1024}, {}),
        ("another chip", LOGITS, {"STUB_CUDA_DEVICES": "8.0:108:Stub A100"}),
        ("both transposed", LOGITS | {"transpose_b": True}, {}),
        ("tiles without a measurement", LOGITS, {"STUB_LT_PROPOSALS": "248:5:1:4;24:3:1:4"}),
        ("no proposal", LOGITS, {"STUB_LT_PROPOSALS": ""}),
        ("split-k only", D_INPUT, {"STUB_LT_PROPOSALS": "20:3:2:16"}),
        ("switched off", LOGITS, {"LIGER_OPS_TILES": "0"}),
        ("an unusable driver", LOGITS, {"STUB_CUDA_FAIL": "cuInit=100"}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_cublas_keeps_its_own_choice(what, given, env):
    (served, ran, _), log = run_stub(given, **env)
    assert served == [None] and ran == [] and not log


# 256x144, 256x176, 176x256: tiles that the algorithms of 256x128 and 128x256 also accept
LARGER = "500:4;504:4;203:4"
MLP = [
    gemm_of(True, False, 4096, 16384, 14336), gemm_of(False, False, 4096, 16384, 14336),
    gemm_of(False, True, 4096, 14336, 16384), gemm_of(False, True, 14336, 4096, 16384),
]  # fmt: skip


@pytest.mark.parametrize(
    "tiles,chosen",
    [
        (LARGER, [(500, 1), (500, 1), (504, 1), (203, 2)]),
        ("504:4", [(29, 4), (29, 4), (504, 1), (24, 1)]),
        # cuBLAS has none of these tiles, or the workspace is too small for them.
        ("", [(29, 4), (29, 4), (24, 1), (24, 1)]),
        ("500:4097;504:4097;203:4097", [(29, 4), (29, 4), (24, 1), (24, 1)]),
    ],
    ids=str,
)
def test_sustained_gemms_use_larger_tiles_than_proposed(tiles, chosen):
    (served, ran, _), log = run_stub(*(p | {"sustained": True} for p in MLP), STUB_LT_TILES=tiles)
    assert served == [True] * len(MLP) and not log
    assert [(r["tile"], r["place"]) for r in ran] == chosen
    assert all(r["workspace"] == [1024, 0 if r["tile"] == 29 else 4] for r in ran)


def test_other_gemms_do_not_use_the_tiles_of_sustained_ones():
    (_, ran, _), _ = run_stub(LOGITS, D_INPUT, D_WEIGHT, STUB_LT_TILES=LARGER)
    assert [r["tile"] for r in ran] == [201, 20, 29]


def test_sustained_and_other_gemms_of_one_size_have_their_own_plans():
    problem = MLP[0]
    (_, ran, _), _ = run_stub(problem, problem | {"sustained": True}, problem, STUB_LT_TILES=LARGER)
    assert [r["tile"] for r in ran] == [29, 500, 29]


def test_a_process_without_cublas():
    assert run_stub(LOGITS, loaded=False).value == [None]


def test_a_refused_gemm_is_logged_once():
    (served, _, _), log = run_stub(LOGITS, LOGITS, D_WEIGHT, STUB_LT_REFUSES="15")
    assert served == [False] * 3
    assert log == [
        "a GEMM failed in a tile that cuBLAS had proposed: cublasLtMatmul returned "
        "CUBLAS_STATUS_NOT_SUPPORTED (15); its own choice runs instead"
    ]


def refused_after_a_device_error(problem):
    from ctypes import CDLL

    CDLL("libcublasLt.so.13")
    try:
        return runtime.multiply(**problem)
    except RuntimeError as error:
        return str(error)


def test_a_gemm_that_fails_after_a_device_error_names_the_driver_error():
    message, log = run(refused_after_a_device_error, LOGITS, STUB_CUDA_FAIL="cuMemGetInfo=700", STUB_LT_REFUSES="13")
    assert not log and message.startswith(
        "GEMM failed: cublasLtMatmul returned CUBLAS_STATUS_EXECUTION_FAILED (13), "
        "cuMemGetInfo returned CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    )
    assert message.endswith("to find it)")


@pytest.mark.parametrize("status,kept", [("1", False), ("3", False), ("13", False), ("14", False), ("15", True)])
def test_a_plan_that_failed_with_a_device_error_is_retried(status, kept):
    (served, _, _), _ = run_stub(LOGITS, LOGITS, STUB_LT_PLAN_FAILS=status)
    assert served == [None, None if kept else True]


def serve_in_a_capture(problems):
    served = serve(problems)[0]
    return served, [c["mode"] for c in calls("cuThreadExchangeStreamCaptureMode")], driver.capture_mode()


def test_the_first_gemm_may_be_part_of_a_capture():
    """cuBLAS loads its kernels in relaxed capture mode; the thread's own mode is restored afterwards."""
    assert run(serve_in_a_capture, [LOGITS, LOGITS], needs=[serve]).value == [[True, True], ["2", "0"] * 3, 0]


def test_each_device_has_a_handle():
    devices = "9.0:132:Stub H200;9.0:132:Stub H200"
    (served, _, handles), _ = run_stub(LOGITS, LOGITS | {"device": 1}, LOGITS, STUB_CUDA_DEVICES=devices)
    assert served == [True] * 3 and handles == 2


# ---- The measurements behind the table.


@pytest.mark.parametrize(
    "sustained,tiles,measured,gained,lost",
    # For sustained GEMMs, the table's 128x160 entry comes from a training step, not from this measurement.
    [(False, 14, 121, 0.07, 0.005), (True, 33, 25, 0.02, 0.01)],
    ids=["short", "sustained"],
)
def test_the_table_fits_its_measurement(sustained, tiles, measured, gained, lost):
    rates = gemm.table(sustained)
    assert len(rates) == tiles and all(500 < rate < 1000 for rate, _ in rates.values())
    name = f"nvidia-h200-gemm{'-sustained' * sustained}.jsonl"
    machine, *records = read(ROOT / "benchmarks" / "results" / name)
    gains, missed = [], []
    for record in records:
        found = gemm.Gemm(record["role"], tuple(record["layer"]))
        ms = record["ms"]
        chosen = ms[gemm.choice(found, list(ms), rates, machine["multiprocessors"], sustained)]
        gains.append(ms["torch"] / chosen - 1)
        missed.append(chosen / min(ms.values()) - 1)
    assert machine.get("sustained", False) == sustained and len(records) == measured and min(gains) > -0.05
    assert sum(gains) / len(gains) > gained and sum(missed) / len(missed) < lost


@pytest.mark.parametrize(
    "name,sustained,epilogue", [("128x160/2x1", False, 64), ("128x160/2x1", True, 0), ("256x176/1x2", True, 160)]
)
def test_fitting_recovers_the_rates_behind_the_times(name, sustained, epilogue):
    tile, layers = gemm.Tile.of(name), [(1024, 4096, 32000), (512, 2048, 50304), (4096, 4096, 4096)]
    records = []
    for layer in layers:
        found = gemm.Gemm("d weight", layer)
        ms = gemm.expected_ms(found, tile, 700.0, epilogue, 132, sustained)
        # Equal if the last wave is full: work divided by rate.
        assert ms >= 2 * gemm.multiplications(found) / 700e9
        records.append(dict(role=found.role, layer=layer, ms={"torch": 2 * ms, str(tile): ms, f"{name}/4": 1.0}))
    ((key, (rate, found, error, count)),) = gemm.fit(records, 132, sustained).items()
    assert (
        key == ((False, True), tile) and rate == pytest.approx(700) and (found, count) == (epilogue, 3) and error < 1e-9
    )


def test_every_order_of_two_neighbours_occurs_once():
    order, names = [], "abcd"

    def clock(way, calls):
        way()
        return lambda: 4.0

    gemm.in_turns({name: partial(order.append, name) for name in names}, clock)
    # Each is first called twice: once to load it, once to estimate its time.
    rounds = [order[i : i + len(names)] for i in range(2 * len(names), len(order), len(names))]
    follows = Counter(pair for turn in rounds for pair in zip(turn, turn[1:]))
    assert len(rounds) == gemm.SHORT.rounds and set(follows.values()) == {1}


def test_proposals_are_measured_in_turns(monkeypatch):
    header = "".join(f"CUBLASLT_MATMUL_TILE_{name},\n" for name in (
        "128x160 = 29", "320x128 = 248", "256x128 = 24", "256x144 = 500", "256x176 = 504",
    )) + "CUBLASLT_CLUSTER_SHAPE_2x1x1 = 3,\nCUBLASLT_CLUSTER_SHAPE_1x2x1 = 5,\n"  # fmt: skip
    tiles, clusters = gemm.numbers_of(header, "MATMUL_TILE"), gemm.numbers_of(header, "CLUSTER_SHAPE")
    assert tiles[248] == (320, 128) and len(tiles) == 5 and clusters == {3: (2, 1), 5: (1, 2)}
    monkeypatch.setenv("STUB_LT_PROPOSALS", "248:3:1:4;29:3:1:0;29:3:1:4;29:3:4:99;23:3:1:0;24:5:1:0")
    monkeypatch.setenv("STUB_LT_TILES", "504:4;203:4")
    library = ctypes.CDLL(str(stub_cuda.cublas_folder() / "libcublasLt.so.13"))
    library.stub_lt_record.restype = ctypes.c_char_p
    cublas = gemm.Cublas(library, tiles, clusters)

    def clock(way, calls):
        for _ in range(calls):
            way()
        return lambda: 4.0

    found = list(gemm.measure(cublas, [(8, 16, 32)], "cpu", clock))
    assert [r["role"] for r in found] == list(gemm.ROLES)
    for record in found:
        # Tiles that the header does not name and duplicates are excluded. cuBLAS has one tile beyond the proposals.
        names = ["torch", "320x128/2x1", "128x160/2x1", "128x160/2x1/4", "256x128/1x2", "256x176/1x2"]
        assert record["ms"] == dict.fromkeys(names, 4.0)
    ran = json.loads(f"[{library.stub_lt_record().decode().rstrip(',')}]")
    ways, calls = len(names) - 1, 2 + gemm.SHORT.rounds * 2
    assert len(ran) == 4 * ways * calls
    assert {(r["place"], r["tile"]) for r in ran} == {(0, 248), (1, 29), (3, 29), (5, 24), (5, 504)}
    shapes = [ran[i * ways * calls][key][1:3] for i in range(4) for key in ("a", "b", "c")]
    assert shapes[:3] == [[16, 32], [16, 8], [32, 8]]  # w, x, y, columns first
    assert shapes[3:6] == [[16, 32], [32, 8], [16, 8]]  # w, dy, dx
    assert shapes[6:9] == shapes[9:] == [[16, 8], [32, 8], [16, 32]]  # x, dy, dw
    assert [ran[i * ways * calls]["beta"] for i in range(4)] == [0, 0, 0, 1]


def test_long_turns_measure_only_the_fastest(monkeypatch):
    """The fastest by first estimate, and torch. Calls made to settle the clock are not counted."""
    turns = gemm.Turns(rounds=2, seconds=0.004, most=10000, settling=0.01, contenders=2)
    took, ran = dict(torch=4.0, a=3.0, b=1.0, c=2.0, d=2.5), []

    def way(name):
        return lambda: ran.append(name)

    def clock(way, calls):
        for _ in range(calls):
            way()
        return lambda name=ran[-1]: took[name]

    found = gemm.in_turns({name: way(name) for name in took}, clock, turns)
    assert found == dict(torch=4.0, b=1.0, c=2.0)
    # One call to load and one to estimate. Each round: 10 ms to settle the clock and 4 ms measured, at least two calls.
    assert Counter(ran) == dict(torch=2 + 2 * (2 + 2), a=2, b=2 + 2 * (10 + 4), c=2 + 2 * (5 + 2), d=2)
