"""OpenAI's way to ask for embeddings: a parser in front of the engine and an encoder behind it."""
