"""What may come in, and what is refused for its size."""
