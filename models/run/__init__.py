"""Capture during one forward: hooks attached, tensors reduced inside them, everything detached."""
