"""Where HTTP's world ends and torch's begins: one thread for each loaded model, and an async face."""
