#!/usr/bin/env bash
# Runs the tests and benchmarks that need a GPU. Python must have a CUDA build of torch.
#   benchmarks/gpu.sh OUT [STEP ...]     default: build test anchors
# Steps: build, unpack (use the libraries and packs of dist/*.whl instead of a build), test, jit (tests without packs),
# ptx (tests of kernels that the driver compiles), sanitize (the norms under compute-sanitizer), wheel (dist/*.whl in a
# process without Triton and compiler), anchors, quick, full, paper, rows (the row kernel of the losses alone), gemm
# (cuBLAS's proposals), training, loss_curves.
# After a failed step the next step runs. BENCH holds options for the suites, e.g. BENCH="--ops rms_norm".
# On an H200 with 16 cores: build 70 s, test 7 min (half of it AOTInductor), anchors 6 min, training 2 min per model.
set -uo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,9s/^# *//p' "$0"
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
[ $# -gt 0 ] || set -- build test anchors

tables=()
results=()
failed=0
for step in "$@"; do
    log=$out/$step.log
    start=$SECONDS
    case $step in
    build) make build PYTHON="$python" >"$log" 2>&1 ;;
    unpack)
        (
            wheel=$(ls dist/*.whl | head -1)
            "$python" -m zipfile -e "$wheel" "$out/wheel" && cp -r "$out"/wheel/liger_ops/{lib,packs} liger_ops/ && rm -r "$out/wheel"
        ) >"$log" 2>&1
        ;;
    test) "$python" -m pytest -m gpu -q -p no:cacheprovider tests >"$log" 2>&1 ;;
    jit)
        mkdir -p "$out/no-packs"
        LIGER_OPS_PACK_DIR=$out/no-packs "$python" -m pytest -m gpu -q -p no:cacheprovider tests >"$log" 2>&1
        ;;
    ptx)
        mkdir -p "$out/ptx" && cp liger_ops/packs/ptx.pack "$out/ptx/"
        LIGER_OPS_JIT=0 LIGER_OPS_PACK_DIR=$out/ptx "$python" -m pytest -m gpu -q -p no:cacheprovider tests >"$log" 2>&1
        ;;
    sanitize)
        (
            for tool in memcheck racecheck; do
                compute-sanitizer --tool "$tool" --kernel-name kns=norm --error-exitcode 1 \
                    "$python" -m pytest -m gpu -q -p no:cacheprovider -k "sizes or strides" tests/ops/norms || exit 1
            done
        ) >"$log" 2>&1
        ;;
    wheel) "$python" tests/packaging/wheel_check.py "$(ls dist/*.whl | head -1)" --device cuda >"$log" 2>&1 ;;
    rows) "$python" -m benchmarks tune cross_entropy_ --as-is --kernels cross_entropy_fwd_bwd >"$log" 2>&1 ;;
    gemm) "$python" -m benchmarks gemm --out "$out" >"$log" 2>&1 ;;
    training | loss_curves) "$python" -m "benchmarks.$step" --device cuda --out "$out" >"$log" 2>&1 ;;
    quick | full | paper | anchors)
        # shellcheck disable=SC2086
        "$python" -m benchmarks --suite "$step" --device cuda --out "$out" ${BENCH:-} >"$log" 2>&1
        ;;
    *) echo "no such step" >"$log"; false ;;
    esac
    status=$?
    verdict=ok
    if [ $status -ne 0 ]; then
        verdict="FAILED (exit status $status)"
        failed=1
    fi
    results+=("$step: $verdict, $((SECONDS - start)) s")
    echo "== ${results[-1]}"
    case $step in
    test | jit | ptx | sanitize) grep -E '^(FAILED|ERROR)' "$log" | cut -c1-200 | head -30; tail -n 1 "$log" ;;
    wheel) tail -n 20 "$log" ;;
    build | unpack) [ $status -eq 0 ] || tail -n 30 "$log" ;;
    *) if grep -q '^# ' "$log"; then tables+=("$log"); else tail -n 15 "$log"; fi ;;
    esac
done

for log in ${tables[@]+"${tables[@]}"}; do
    echo
    sed -n '/^# /,$p' "$log" | sed -E 's/ {2,}/ /g; s/-{3,}/-/g'
done
printf '%s\n' "" "${results[@]}"
exit $failed
