"""Items made into rows."""
