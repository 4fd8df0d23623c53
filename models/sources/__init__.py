"""Where architectures come from: torchvision, timm, a directory of transformers, or a factory in a Python module."""
