"""Readers of strangers' bytes under a fuzzer that sees which code each input reaches: ``make fuzz``."""
