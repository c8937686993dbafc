"""``python -m polythrottle`` is ``polythrottle``."""

from polythrottle.cli import main

main()
