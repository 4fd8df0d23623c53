"""The configuration file: which models there are. YAML, of which JSON is a part."""
