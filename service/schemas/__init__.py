"""The bodies of requests as pydantic models and what they mean, what replies are, examples of requests. No torch."""
