"""The bodies of requests as pydantic models and their meaning, models of replies, examples of requests. No torch."""
