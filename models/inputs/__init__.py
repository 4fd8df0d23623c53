"""A model's inputs: preprocessed pictures, padded texts."""
