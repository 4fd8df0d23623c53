"""Gradients of one forward: what is differentiated, with respect to what, and explanations made of it."""
