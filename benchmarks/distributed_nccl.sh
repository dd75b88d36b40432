#!/bin/sh
# Train in several processes with NCCL on one machine: sh benchmarks/distributed_nccl.sh [PROCESSES] [OTHER OPTIONS OF elias train]
#
# Generates a corpus, trains on it with torchrun on this number of GPUs (default: one), interrupts the
# run, resumes it, and trains once more in a single process. Compare the metrics of the two and the last
# lines of the log by eye; dropout is off, so they should agree. DEVICE=cpu uses gloo instead; POINTS and
# LABELS set the size of the corpus; logs are kept in a folder LOGS.
set -eu
processes=${1:-1}
[ $# -eq 0 ] || shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
logs=${LOGS:-$place}
mkdir -p "$logs"
export PYTHONPATH="${PYTHONPATH:-src}"
python=${PYTHON:-python3}

"$python" - "$place/corpus" "${POINTS:-20000}" "${LABELS:-5000}" <<'PYTHON'
import sys

from elias.data.synthetic import write_synthetic

write_synthetic(sys.argv[1], n_points=int(sys.argv[2]), n_labels=int(sys.argv[3]), seed=1)
PYTHON

set -- "$place/corpus" --device "${DEVICE:-cuda}" --set rerank.enabled=false \
    --set encoder.dropout=0 --set encoder.token_dropout=0 \
    --set stages.stage1.epochs=3 --set stages.stage2.epochs=3 --set checkpoint.minutes=0.02 "$@"

echo "== torchrun, $processes process(es), stopped after a while"
"$python" -m torch.distributed.run --nproc-per-node "$processes" \
    -m elias train "$@" --out "$place/together" > "$logs/first.log" 2>&1 &
started=$!
waited=0
while [ ! -d "$place/together/checkpoints/00000002" ] && kill -0 "$started" 2> /dev/null; do
    sleep 0.2
    waited=$((waited + 1))
    [ "$waited" -lt 1500 ] || break
done
kill -TERM "$started" 2> /dev/null || true
wait "$started" || echo "ended with $?"
tail -n 3 "$logs/first.log"
ls "$place/together/checkpoints/"* 2> /dev/null || true

echo "== the same command again"
"$python" -m torch.distributed.run --nproc-per-node "$processes" \
    -m elias train "$@" --out "$place/together" > "$logs/again.log" 2>&1 || echo "ended with $?"
grep -v "^no --" "$logs/again.log" | tail -n 12
grep resumed "$place/together/train.log" || echo "it was not resumed"

echo "== one plain process"
"$python" -m elias train "$@" --out "$place/alone" > "$logs/alone.log" 2>&1 || echo "ended with $?"
tail -n 8 "$logs/alone.log"

echo "== losses and times, epoch by epoch: together, alone"
for run in together alone; do
    "$python" - "$place/$run/metrics.jsonl" <<'PYTHON'
import json
import sys

for line in open(sys.argv[1]):
    found = json.loads(line)
    if found["event"] == "epoch":
        print(found["stage"], found["epoch"], round(found["loss"], 5), round(found["seconds"], 2))
    elif found["event"] == "stage":
        print(found["stage"], found.get("test"))
PYTHON
done
