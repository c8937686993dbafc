"""``python -m polythrottle.daemon.actuator``."""

import sys

from polythrottle.daemon.actuator.main import main

if __name__ == "__main__":
    sys.exit(main())
