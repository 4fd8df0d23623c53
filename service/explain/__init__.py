"""Explanations, probes and sweeps: requests to the engine, and results computed from its features."""
