"""Forwards that resume from a layer's output, once it is verified that they can."""
