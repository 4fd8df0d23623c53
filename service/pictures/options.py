"""What a request may say of its picture: how many tiles of each result there are at most.

A tile is a channel of a map, or a head of attention.
"""

TILES, MAX_TILES = 16, 256
