"""Explanation maps, and the layers that they are computed from."""
