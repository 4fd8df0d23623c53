"""Warm plans: what layers give, as a graph that was exported with the hooks on it and compiled, kept on disk."""
