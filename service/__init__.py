"""The service: an HTTP server in front of the engine that runs the models."""

if __name__ == "service":  # a second set of classes, which `isinstance` and `except` would not know
    raise ImportError("this folder is imported as layertap.service")
