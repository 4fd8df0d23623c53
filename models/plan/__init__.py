"""What a request names, looked up in a catalog and made into a plan: read ``planner.py`` first."""
