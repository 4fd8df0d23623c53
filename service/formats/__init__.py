"""The formats of replies: one file each, and a table of all."""
