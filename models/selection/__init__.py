"""What a request names, looked up in a catalogue, and what is captured for it."""
