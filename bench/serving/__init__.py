"""Throughput, latency, cost and early stops of a server, beside a plain loop: ``python -m bench.serving``."""
