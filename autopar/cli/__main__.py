"""`python -m autopar.cli`."""

from . import main

main()
