"""Models, their layers and their hooks: torch, and never HTTP."""

if __name__ == "models":  # a second set of classes, which `isinstance` and `except` would not know
    raise ImportError("this folder is imported as layertap.models")
