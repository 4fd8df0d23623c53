"""Changes of values in flight: a request's interventions looked up, and the operations themselves."""
