"""Turns parsed requests into features: an async interface in front of one thread or process pool per loaded model."""
