"""Models as users write them, over HTTP, beside plain PyTorch: what a survey may see once, and must not believe."""
