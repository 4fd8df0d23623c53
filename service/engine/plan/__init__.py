"""Plans: what a request names, resolved to what is captured for it."""
