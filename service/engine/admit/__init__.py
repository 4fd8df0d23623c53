"""Admission control: limits on waiting work and on the size of requests."""
