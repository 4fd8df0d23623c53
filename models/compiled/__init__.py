"""Warm plans: captures as graphs that are exported with the hooks attached, compiled, and kept on disk."""
