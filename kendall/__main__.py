"""`python -m kendall` is `kendall`."""

from kendall.cli import main

main()
