#!/bin/bash
# Run all GPU benchmarks in one call, the most important first.
#   bash benchmarks/gpu_final.sh OUT SECONDS
# No part starts within the last 10 s, and none exceeds the limit. Each writes its JSON after every
# entry, so that an interrupted part leaves its results.
out=${1:-benchmarks/results}
budget=${2:-180}
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

part() { # limit, command
    local left=$((budget - SECONDS)) limit=$1
    shift
    if ((left < 10)); then
        echo "== left out: $*"
        return
    fi
    echo "== $*"
    timeout $((limit < left ? limit : left)) "$python" "$@" --out "$out" 2>&1
    echo "== exit $?, at $SECONDS s"
}

step() { # limit, name of the JSON, options
    local limit=$1 name=$2
    shift 2
    part "$limit" benchmarks/gpu_step.py --storage compact --no-naive --no-encoder --repeat 10 \
        --name "$name" "$@"
}

{
    part 55 benchmarks/gpu_check.py --quick
    step 100 gpu_step --compile on --shapes 131K 2.8M 670K
    part 50 benchmarks/gpu_predict.py --quick --no-naive --compile on --batches 512 --shapes 131K 2.8M 670K
    step 60 gpu_step_captured --captured --no-kernels --compile on --shapes 2.8M 131K 670K
    step 75 gpu_step_captured --no-head --captured --compile on --shapes 2.8M
} | tee "$out/final.log"
