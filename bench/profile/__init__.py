"""Where each millisecond of a request goes: ``python -m bench.profile``."""
