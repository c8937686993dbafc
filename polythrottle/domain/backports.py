"""What Python 3.11 brought and 3.10 lacks, in one place that goes when 3.10 does.

JetPack 6 has Python 3.10, and NVIDIA builds torch and onnxruntime with CUDA for that one only.
"""

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum  # novermin

    import tomllib
else:
    from enum import Enum

    import tomli as tomllib

    class StrEnum(str, Enum):
        """An enumeration whose members are strings, also when formatted."""

        __str__ = str.__str__
        __format__ = str.__format__  # type: ignore[assignment]


__all__ = ["StrEnum", "tomllib"]
