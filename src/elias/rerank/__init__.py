"""ELIAS++: rerank the best labels with a sparse ranker, and calibrate the scores (§3.5)."""
