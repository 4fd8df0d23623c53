"""Requests by kind: each module has ``requests()``."""
