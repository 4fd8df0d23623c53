"""Gradients of one forward: what is differentiated, with respect to what."""
