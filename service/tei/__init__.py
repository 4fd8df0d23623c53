"""text-embeddings-inference's routes, and ``/rerank`` as Jina, Cohere and infinity have it."""
