"""The service: HTTP in front, one thread for each loaded model behind."""

if __name__ == "service":  # a second set of classes, which `isinstance` and `except` would not know
    raise ImportError("this folder is imported as layertap.service")
