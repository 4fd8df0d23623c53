"""Models, their layers and their hooks: torch, and never HTTP."""
