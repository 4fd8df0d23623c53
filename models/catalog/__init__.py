"""What one forward of a model does, layer by layer: measured once, then only read."""
