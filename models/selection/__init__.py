"""What a request names, and what is captured for it; all of it plain data."""
