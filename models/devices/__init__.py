"""Devices: their names, threads and memory, copies to and from them, and turns of models that load."""
