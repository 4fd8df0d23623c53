"""How many requests a second the server's own process can take, whatever its workers compute."""

DECODE_FIRST = "BENCH_DECODE_FIRST"  # an environment variable: so many pictures in a message
