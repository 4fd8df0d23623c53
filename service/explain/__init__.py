"""Explanations and probes: requests to the engine, and what they make of its features."""
