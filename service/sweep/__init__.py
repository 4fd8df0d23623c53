"""Sweeps: one edit, tried at each place and index, each time on a row of its own."""
