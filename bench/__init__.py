"""Measurements; each is a module to run, and none is a test."""
