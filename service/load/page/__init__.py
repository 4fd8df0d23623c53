"""A run as one HTML file with plots."""
