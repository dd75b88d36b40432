"""Convert texts to tokens, tf-idf features and batches."""
