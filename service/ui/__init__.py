"""The files of the explorer at ``/``: a page, its scripts and styles, and pictures to try."""
