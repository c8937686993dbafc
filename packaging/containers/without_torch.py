"""Print what a wheel needs, extras, torch and what stands on it left out: ``without_torch.py polythrottle-….whl``."""

import sys
import zipfile
from email import message_from_bytes

wheel = zipfile.ZipFile(sys.argv[1])
(metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for needed in message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist", []):
    if "extra ==" not in needed and not needed.startswith(("torch", "botorch", "gpytorch")):
        print(needed)
