"""The formats of a reply: a file each, and one table."""
