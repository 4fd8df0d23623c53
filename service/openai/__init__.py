"""OpenAI's embeddings API: a parser before the engine and an encoder after it."""
