"""Texts as tokens, tf-idf features and batches."""
