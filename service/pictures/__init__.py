"""Pictures for people, of arrays: colours, tiles, sheets. Knows numpy and Pillow, neither torch nor HTTP."""
