"""Routes and what surrounds them: FastAPI and never torch."""
