"""The inputs of a request: encoded pictures, arrays, texts, tokens."""
