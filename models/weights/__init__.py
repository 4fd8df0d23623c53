"""Checkpoints on disk, and weights in a module."""
