"""The bodies of requests as pydantic models, and what they mean: selectors, interventions, items. No torch."""
