"""The formats of replies: a file each, and a table."""
