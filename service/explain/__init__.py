"""Explanations and probes: requests to the engine, and results computed from its features."""
