"""Explanations and probes: requests to the engine, and what is made of their features."""
