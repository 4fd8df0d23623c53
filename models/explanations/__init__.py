"""Maps that explain an answer, and the layers that they are made of."""
