#!/usr/bin/env bash
# `make gpu`: checks, measures, tests and tunes on this machine's GPU in nine minutes, the most valuable results first.
#
#   OUT=gpu-out JOBS=12 PYTHON=python3 PARTS="check routes" perf/gpu.sh [PYTEST ARGUMENTS]
#
# A part that fails or runs out of time does not stop those after it; the exit code is 1 then. Every part adds to
# OUT/<part>.log; OUT/*.jsonl are measurements, files of a history, OUT/configs/ are tile shapes.
set -u -f -o pipefail # -f: patterns of cases are no patterns of files
out=$(realpath -m "${OUT:-gpu-out}") python=${PYTHON:-python3} parts=${PARTS:-}
cd "$(dirname "$(realpath "$0")")/.." || exit 2
cores=$(nproc) jobs=${JOBS:-$((cores < 12 ? cores : 12))}
failed="" job=""
trap '[ -z "$job" ] || { kill -INT "$job"; wait "$job"; }; exit 130' INT TERM
long="causal-16k-* full-16k-* document-16k-* window-16k-* causal-h64x8-d64x64-16k-* causal-s2-ring-16k-*"
short="causal-8k-* full-8k-* document-8k-* window-8k-* causal-s8-ring-32k-fwd"
try='--try {"ROUTE":"loops"} --try {"ROUTE":"gluon"} --try {"FUSED_BACKWARD":true}'
export python out jobs long short try PYTHONUNBUFFERED=1 TRITON_INTERPRET=0
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# run PART SECONDS: call the function PART; it gets SIGINT when its time is over, and SIGKILL five seconds later.
run() {
  local part=$1 seconds=$2 code=0
  [[ -z $parts || " $parts " == *" $part "* ]] || return 0
  echo "== $part, at most $seconds seconds"
  timeout --signal=INT --kill-after=5 "$seconds" bash -f -o pipefail -c '"$@"' bash "$@" \
    > >(tee -a "$out/$part.log") 2>&1 &
  job=$!
  wait "$job" || code=$?
  kill -KILL -- "-$job" 2> /dev/null # processes of the part that outlived it
  job=""
  if [ "$code" != 0 ]; then
    if [ "$code" = 124 ] || [ "$code" = 137 ]; then echo "== $part: out of time"; else echo "== $part: exit code $code"; fi
    failed+=" $part"
  fi
}

# measure CASES OPTIONS...
measure() {
  local only=()
  for case in $1; do only+=(--only "$case"); done
  "$python" -m tritoncp.perf.run --seconds 0.4 --out "$out" "${only[@]}" "${@:2}"
}
pytest() { "$python" -m pytest -o addopts= --import-mode=importlib --device cuda -v -ra --durations=10 "$@"; }

# Is every schedule right on this machine, in which dtypes, with which compiler?
check() { "$python" -m tritoncp check --json --budget $(($1 - 10)) > "$out/check.json"; }

# Compile the kernels of `routes`, in a process for each problem and contender.
warm() {
  export TRITONCP_UNSAFE_FUSED=1 # answers are compared with the reference before they are timed
  for case in $long; do
    printf '%s\0' "$case" tritoncp "$case" "tritoncp ROUTE=gluon" "$case" "tritoncp FUSED_BACKWARD=True"
  done | xargs -0 -n 2 -P "$jobs" bash -f -c 'measure "$1" --warm --tier full --contenders "$2" $try' bash
}

# Which forward route is fastest, is the fused backward right, what do ring steps and eight ranks cost?
routes() {
  export TRITONCP_UNSAFE_FUSED=1
  measure "$long $short" --tier full --budget $(($1 - 5)) $try \
    --contenders "tritoncp*" --contenders flash --contenders cudnn --contenders whole
}

# Do narrower or lower forward tiles win?
tiles() {
  measure "causal-16k-fwd full-16k-fwd" --budget $(($1 - 5)) --contenders "tritoncp*" \
    --try '{"fwd_BLOCK_N": 64, "fwd_maxnreg": 128}' --try '{"fwd_BLOCK_M": 64, "fwd_num_warps": 4}'
}

# How much faster than PyTorch's flex attention, tuned? A budget that is never used up: the tuned variant starts last.
flex() {
  measure "$2-16k-*" --budget 600 --contenders flex --contenders "flex flash" --contenders "flex max-autotune" \
    --contenders flash --contenders cudnn
}

# Which features of the package work on this GPU? Ten tests a process; kernels that may hang are in the last ones.
tests() {
  local code=0
  export OMP_NUM_THREADS=1
  pytest tests/kernels/test_smoke.py || code=1
  {
    pytest --collect-only -qq tests/gpu/test_copies.py tests/gpu/test_uploads.py tests/compiled/test_calls.py "${@:2}"
    pytest --collect-only -qq -m "not long and not nightly" tests/kernels --ignore tests/kernels/test_smoke.py \
      tests/compiled/test_launches.py tests/test_extremes.py "${@:2}"
    pytest --collect-only -qq tests/compiled/test_gluon.py "${@:2}"
  } | grep :: | xargs -d '\n' -n 10 -P "$jobs" bash -c 'pytest "$@"' bash || code=1
  return $code
}

# Do copies overlap with kernels? Compares times, so it has the GPU for itself.
overlap() { pytest -s tests/gpu/test_overlap.py; }

# Which tiles and route are best for a usual call?
autotune() {
  "$python" -m tritoncp autotune --mask causal --ops routes,bwd --out "$out/configs" --jobs "$jobs" --budget "$(($1 - 12))s"
}

# Does any kernel of the smoke tests read or write out of bounds? A memory pool would hide it.
sanitizer() {
  command -v compute-sanitizer > /dev/null || { echo "not run: compute-sanitizer is not on PATH"; return 0; }
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
    "$python" -m pytest -o addopts= --import-mode=importlib --device cuda -v tests/kernels/test_smoke.py
}

export -f measure pytest check warm routes tiles flex tests overlap autotune sanitizer
"$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch finds no GPU here")' || exit 2
mkdir -p "$out" || exit 2
run check 60
run warm 40
run routes 55
run tiles 30
run flex 60 causal
run flex 50 document
run tests 95 "$@"
run overlap 25
run autotune 75
run sanitizer 25
[ -z "$failed" ] || { echo "make gpu: failed:$failed"; exit 1; }
