#!/bin/sh
# On a machine with a CUDA device: the tests of accelerators, which of the settings that need CUDA hold, what the device
# can do at best, and the serving benchmark.
#
#     bench/gpu.sh [FOLDER OF WHEELS]
#
# $PYTHON (default: python3) is 3.11 or newer and has torch and torchvision. What else is missing there may lie in the
# folder as wheels; nothing is fetched, and the Python stays as it is. $BENCH_OUT (default: bench/results) gets the JSON.
# What fails is reported and does not stop the rest. Exit status: 0 where the GPU tests passed, 1 where they did not,
# 2 where there is nothing to run them on.
set -u
wheels=${1:+$(cd "$1" && pwd)} || exit 2
PYTHON=${PYTHON:-python3}
case $PYTHON in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac
cd "$(dirname "$0")/.." || exit 2
out=${BENCH_OUT:-bench/results}
day=$(date -u +%Y-%m-%d)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

say() { printf '\n== %s\n' "$*" >&2; }
step() { # NAME COMMAND...: runs it, and says so where it failed
    say "$1"; shift
    "$@" || { status=$?; say "failed with status $status: $*"; return $status; }
}

"$PYTHON" -c 'import torch' || { say "no torch for $PYTHON: name another by PYTHON="; exit 2; }
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    say "torch.cuda is not available: no CUDA device, no driver, or a torch without CUDA; nothing was run"
    exit 2
}
if [ -n "$wheels" ]; then
    step "wheels" "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$wheels"/*.whl
    PYTHONPATH="$PYTHONPATH:$work/site"
fi
mkdir -p "$out"

say "tests"
"$PYTHON" -m pytest -p no:cacheprovider -m gpu --junit-xml "$work/tests.xml" tests/gpu >"$work/tests.log" 2>&1
passed=$?
cat "$work/tests.log"
step "settings that need CUDA" "$PYTHON" -m bench.gpu_settings "$work/tests.xml"

step "ceilings" "$PYTHON" -m bench.gpu --json "$out/gpu-ceilings-$day.json" --tests "$(tail -n 1 "$work/tests.log")"

# The server's models are placed by this; without wrk what needs no load generator is measured.
export BENCH_DEVICE=cuda
only="--only server threads early"  # the plain loop and the peers compute on the CPU, which would be no comparison
command -v wrk >/dev/null || { say "wrk is missing: one connection only"; only="--only early"; }
for run in "1 exact" "2 exact" "1 device" "2 device"; do
    streams=${run% *} decode=${run#* }
    # shellcheck disable=SC2086
    step "serving, $streams stream(s), decode: $decode" env LAYERTAP_GPU_STREAMS="$streams" BENCH_DECODE="$decode" \
        "$PYTHON" -m bench.serving --rounds 2 --seconds 8 --loads resnet50 $only \
        --json "$out/gpu-serving-$streams-$decode-$day.json"
done

[ "$passed" -eq 0 ] || { say "the GPU tests did not pass"; exit 1; }
