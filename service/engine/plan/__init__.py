"""What a request names, as what is captured for it."""
