"""OpenAI's embeddings API: a parser in front of the engine and an encoder behind it."""
