"""Sources of architectures: torchvision, timm, a transformers directory, or a factory in a Python module."""
