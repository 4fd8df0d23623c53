"""Items converted to rows."""
