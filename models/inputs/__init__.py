"""What a model takes: pictures preprocessed, texts padded."""
