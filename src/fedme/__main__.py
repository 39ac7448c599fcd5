"""``python -m fedme`` is the command line."""

from fedme.cli import main

main()
