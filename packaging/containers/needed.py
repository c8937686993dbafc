"""Print what a wheel needs for a role: ``needed.py polythrottle-….whl actuator``, ``daemon`` or ``tuner``.

The actuator and restoring need little more than NumPy; the daemon what serves its API and asks a kubelet; the tuner,
which searches, models and draws, everything.
"""

import re
import sys
import zipfile
from email import message_from_bytes

ACTUATOR = {"numpy", "nvidia-ml-py", "tomli", "tomli-w", "typing-extensions"}
SEARCHING = {"botorch", "fsspec", "gpytorch", "matplotlib", "pandas", "pillow", "scipy", "threadpoolctl", "torch"}
EXTRAS = {"actuator": set(), "daemon": {"kubernetes"}, "tuner": {"kubernetes", "serving"}}


def needed(requirement: str, role: str) -> bool:
    """Return whether a role needs it."""
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
    if extra is not None:
        return extra[1] in EXTRAS[role]
    if role == "actuator":
        return name in ACTUATOR
    return role == "tuner" or name not in SEARCHING


def main(file: str, role: str) -> None:
    """Print a line for each requirement."""
    wheel = zipfile.ZipFile(file)
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    for each in message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist", []):
        if needed(each, role):
            print(re.sub(r"\s*(?:;|and)\s*extra == ['\"]\w+['\"]", "", each))


main(*sys.argv[1:])
