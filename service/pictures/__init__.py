"""Draws arrays for people: colours, tiles, sheets. Uses numpy and Pillow, neither torch nor HTTP."""
