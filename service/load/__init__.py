"""The load tester, ``layertap load URL``. It knows the server by HTTP only, and needs no torch."""
