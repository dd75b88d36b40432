"""Train a model: stages, optimizer, checkpoints, runs and memory estimates."""
