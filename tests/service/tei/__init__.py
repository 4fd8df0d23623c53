"""Tests of reranking, and of the routes of text-embeddings-inference."""
