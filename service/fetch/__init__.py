"""Pictures at URLs: which URLs are accepted, which addresses may be contacted, and the fetch itself."""
