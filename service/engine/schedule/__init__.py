"""Which rows share a forward, and when it starts."""
