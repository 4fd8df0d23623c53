"""The models of this process, from loading to unloading."""
