#!/usr/bin/env bash
# A quarter of an hour on one GPU: what is there, attention kernels, parity on CUDA, the full-size step three ways.
# Usage: bench/gpu.sh [RESULTS]; PYTHON names the interpreter, DEVICE=cpu SIZE=tiny runs it through without a GPU, and
# PATIENCE=4 gives each part four times as long.
# Nothing is downloaded, and the interpreter's own torch is used. A part that fails or takes too long does not keep the
# others from running; the exit code is 1 then. Results are one JSON file a part.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results="$(realpath -m "${1:-bench/results/gpu}")"
python="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XDG_CACHE_HOME="${XDG_CACHE_HOME:-$results/cache}"
mkdir -p "$results"
failed=0

part() { # NAME SECONDS
  local most=$(($2 * ${PATIENCE:-1}))
  echo "== $1 (at most $most s)"
  timeout --kill-after=10 "$most" "$python" -m bench.gpu "$1" --device "${DEVICE:-cuda}" --size "${SIZE:-full}" \
    --out "$results/$1.json" 2>&1 | tee "$results/$1.log"
  local code="${PIPESTATUS[0]}"
  [ "$code" = 0 ] || { echo "== $1 ended with code $code; its words are in $results/$1.log"; failed=1; }
}

part facts 60
part attention 240
part parity 150
part step 330
exit "$failed"
