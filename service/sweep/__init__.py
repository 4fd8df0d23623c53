"""Sweeps: one edit of a forward, tried place by place and index by index, each on a row of its own."""
