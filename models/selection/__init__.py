"""Selectors looked up in a catalogue, and the captures that they ask for."""
