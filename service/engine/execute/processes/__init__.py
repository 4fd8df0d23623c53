"""Processes in which models run, and how the server talks to them."""
