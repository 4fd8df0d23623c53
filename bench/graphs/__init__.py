"""What a model's forward gains by being compiled, by precision, memory format and shapes."""
