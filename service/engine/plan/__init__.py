"""Plans: the selectors of a request, resolved to captures."""
