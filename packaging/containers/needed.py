"""Print what a wheel needs: ``without_torch.py polythrottle-….whl``.

Torch and what stands on it are left out, and extras but that by which the daemon asks a kubelet.
"""

import sys
import zipfile
from email import message_from_bytes

wheel = zipfile.ZipFile(sys.argv[1])
(metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for needed in message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist", []):
    name, _, marker = needed.partition(";")
    if "extra ==" in marker and "'kubernetes'" in marker.replace('"', "'"):
        print(name.strip())
    elif "extra ==" not in marker and not needed.startswith(("torch", "botorch", "gpytorch")):
        print(needed)
