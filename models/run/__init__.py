"""A model in memory: forwards whose hooks reduce what many requests ask, its state kept, its rows checked."""
