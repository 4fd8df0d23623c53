"""What was asked becomes a plan, what was sent becomes jobs."""
