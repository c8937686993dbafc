"""Reading samples: arrays, tensors and pictures, one file each."""

from pathlib import Path

import numpy as np
import torch

from polythrottle.workloads.call import one_line
from polythrottle.workloads.torch_archive import load_tensors

_NOT = {".npy": "it is no array of numbers, or is cut off", ".pt": "it is no plain tensor, or is cut off"}


class Unreadable(Exception):
    """A file that is no sample; never leaves the trainer."""


def read_sample(path: Path, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a sample: reals as float32, whole numbers as int64, a picture as float32 of 0..1, channels first.

    Args:
        path: An array (``.npy``), a tensor (``.pt``) or a picture.
        shape: The shape it must have; None for any.

    Raises:
        Unreadable: If it is missing, is none, or has another shape.
    """
    try:
        tensor = _read(path)
    except MemoryError:
        raise
    except Unreadable:
        raise
    except FileNotFoundError as err:
        raise Unreadable("it is gone") from err
    except Exception as err:  # a file can be broken in as many ways as its library has errors
        # NumPy and torch advise to load it unsafely, which nobody should do.
        raise Unreadable(_NOT.get(path.suffix.lower(), one_line(err))) from err
    if shape is not None and tuple(tensor.shape) != shape:
        raise Unreadable(f"its shape is {tuple(tensor.shape)}, not {shape} like the first sample's")
    return tensor


def _read(path: Path) -> torch.Tensor:
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _plain(torch.from_numpy(np.load(path, allow_pickle=False)))
    if suffix == ".pt":
        tensor = load_tensors(path)
        if not isinstance(tensor, torch.Tensor):
            raise Unreadable(f"it holds a {type(tensor).__name__}, not a tensor")
        return _plain(tensor)
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.float32 if tensor.is_floating_point() else torch.int64
    return tensor.detach().to(kind).contiguous()
