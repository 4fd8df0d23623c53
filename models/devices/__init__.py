"""Devices: their names, copies to and from them, threads, memory, and the costs of forwards."""
