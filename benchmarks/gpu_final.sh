#!/bin/bash
# All that is to be measured on a GPU in one call of two to three minutes, the most telling first.
#   bash benchmarks/gpu_final.sh OUT
# Every part has a limit of its own and writes its JSON as it goes: what ends early leaves the rest.
out=${1:-benchmarks/results}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
begin=$SECONDS

part() { # limit, command
    local limit=$1
    shift
    echo "== $*"
    timeout "$limit" "$python" "$@" --out "$out" 2>&1
    echo "== exit $?, at $((SECONDS - begin)) s"
}

{
    part 50 benchmarks/gpu_check.py --quick
    part 45 benchmarks/gpu_step.py --shapes 131K 670K 2.8M --storage compact --repeat 10 \
        --no-naive --no-whole
    part 70 benchmarks/gpu_step.py --shapes 131K 2.8M 670K --storage compact --repeat 10 \
        --no-naive --no-encoder --no-head --compile on --name gpu_step_on
    part 25 benchmarks/gpu_predict.py --quick --batches --shapes 131K 670K 2.8M
    part 25 benchmarks/gpu_step.py --shapes 131K 670K 2.8M --storage compact --repeat 5 \
        --no-naive --no-encoder --no-head --name gpu_step_off
    part 75 benchmarks/gpu_step.py --shapes 2.8M --storage compact --repeat 10 \
        --no-naive --no-encoder --no-head --compile graphs --name gpu_step_graphs
} | tee "$out/final.log"
