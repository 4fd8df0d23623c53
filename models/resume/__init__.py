"""Forwards that go on from a layer's output, once it is verified that they can."""
