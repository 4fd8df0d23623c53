"""Hostile input against a running server: what it answers, how soon, and what memory it takes for that."""
