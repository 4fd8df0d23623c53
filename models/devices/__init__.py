"""Devices: which there are, copies to and from them, threads, memory, and what a forward costs there."""
