"""`python -m autopar` is the command line."""

from autopar.cli import main

main()
