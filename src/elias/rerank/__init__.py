"""ELIAS++: a sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""
