"""Routes: each file has its own."""
