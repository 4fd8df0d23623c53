"""Interventions on activations: a request's interventions looked up, and the operations themselves."""
