"""How many requests a second the server's own process can take, whatever its workers compute."""
