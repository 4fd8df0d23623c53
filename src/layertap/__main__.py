"""``python -m layertap``."""

from layertap.service.cli.main import main

main()
