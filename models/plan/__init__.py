"""Selectors looked up in a catalog, and the captures that they ask for."""
