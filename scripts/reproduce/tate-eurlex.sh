#!/usr/bin/env bash
# tate-subjects (14,672 labels) and eurlex-mini (3,341 labels), bag encoder, CPU.
#
#   scripts/reproduce/tate-eurlex.sh DATA [RUNS]
#
# DATA holds the folders tate-subjects and eurlex-mini (raw/trn_X.txt, Y.trn.npz, …). Builds the
# tables of docs/reference/results.md: the gain of each component, the ensemble, the fixed graph,
# one-vs-all. Finished steps are not repeated.
set -euo pipefail

data=${1:?give the folder of the corpora}
runs=${2:-runs}

for corpus in tate-subjects eurlex-mini; do
    elias data info "$data/$corpus"
    elias experiment ablation "$data/$corpus" --config "scripts/reproduce/$corpus.toml" --device cpu --one-vs-all \
        --out "$runs/$corpus"
done
