"""The command line: ``layertap serve | check | models | layers | plan | extract | show …``.

The modules here import neither torch nor FastAPI, which take seconds: each command imports what it needs when it runs.
"""
