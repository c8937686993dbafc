"""``python -m polythrottle.actuation.server``."""

from __future__ import annotations

import sys

from polythrottle.actuation.server.main import main

if __name__ == "__main__":
    sys.exit(main())
