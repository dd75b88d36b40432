#!/usr/bin/env bash
# mesh-titles: MEDLINE titles -> MeSH headings (8,484 labels), bag encoder, CPU.
#
#   scripts/reproduce/mesh-titles.sh [RUNS]
#
# Builds the corpus, trains the preset and its control, and prints what docs/results.md shows.
# A few minutes for each model on two cores. Finished runs are not trained again.
set -euo pipefail

runs=${1:-runs}
data=$runs/mesh-titles

train() {  # train RUN OPTIONS…: train the preset into $runs/RUN, unless it is there
    local run=$runs/$1
    shift
    [ -d "$run/model" ] || elias train "$data" --preset mesh-titles --device cpu --out "$run" "$@"
}

# 1. The corpus: downloaded with pip, checked by sha256, built by a fixed recipe.
elias data demo "$data"
elias data info "$data"

# 2. Stages, ranker and calibration, as `make demo` trains them.
train mesh

# 3. The control: the same stages, epochs and rates, but the graph is never learned.
train mesh-fixed --set stages.stage2.learn_graph=false --set rerank.enabled=false

# 4. Two more seeds, to see how much of a difference is chance.
train mesh-seed1 --set seed=1
train mesh-seed2 --set seed=2

# 5. The ensemble of three, and one-vs-all with the same encoder.
train mesh-three --set ensemble.members=3
[ -d "$runs/mesh-all/model" ] ||
    elias train "$data" --preset mesh-titles-one-vs-all --device cpu --out "$runs/mesh-all"

# 6. The table: the test metrics of each stage and component, as they were measured when it ended.
for run in mesh mesh-fixed mesh-seed1 mesh-seed2 mesh-three mesh-all; do
    echo "== $run"
    elias info "$runs/$run"
done

# 7. The saved model, measured again on the whole test split.
elias evaluate "$runs/mesh" "$data" --device cpu
