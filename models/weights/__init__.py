"""Checkpoints on disk, loaded into modules."""
