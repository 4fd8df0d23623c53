"""The service: HTTP in front, one thread for each loaded model behind."""
