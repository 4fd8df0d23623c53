"""HTTP: connections, the application, its routes; uses FastAPI, never torch."""
