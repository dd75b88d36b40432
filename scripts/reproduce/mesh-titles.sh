#!/usr/bin/env bash
# mesh-titles: MEDLINE titles -> MeSH headings (8,484 labels), bag encoder, CPU.
#
#   scripts/reproduce/mesh-titles.sh [RUNS]
#
# Builds the corpus and the tables of docs/reference/results.md: the gain of each component, over three
# seeds with an ensemble of three each, and the pruned index. Takes a few minutes for each of fifteen
# models on two cores. Finished steps are not repeated.
set -euo pipefail

runs=${1:-runs}
data=$runs/mesh-titles

# 1. The corpus: downloaded with pip, checked by sha256, built by a fixed recipe.
elias data demo "$data"
elias data info "$data"

# 2. Stages, ranker, calibration, label names, ensemble; the control with a fixed graph; one-vs-all.
elias experiment ablation "$data" --config scripts/reproduce/mesh-titles.toml --device cpu --out "$runs/mesh" \
    --seeds 0,1,2 --one-vs-all

# 3. The pruned index.
elias experiment prune "$data" --model "$runs/mesh/runs/elias-seed0" --device cpu --out "$runs/mesh"
