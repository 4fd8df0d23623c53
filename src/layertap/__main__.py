"""``python -m layertap``."""

from layertap.service.cli import main

main()
