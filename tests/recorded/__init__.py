"""Records what a server answers to several hundred requests, so that two checkouts can be compared byte for byte.

    python -m tests.recorded record --checkout PATH --out FILE.json
    python -m tests.recorded compare A.json B.json

Nothing of layertap is imported: the checkout's own server runs as a process, and is sent HTTP. Recordings of different
machines are not to be compared: last bits differ.
"""
