"""The samples of an epoch: their order, what of them cannot be read, and whether the folder has changed since."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from polythrottle.errors import BadFile
from polythrottle.finetune.trainer.listing import LABELS, Listing
from polythrottle.finetune.trainer.reading import Unreadable, read_sample


class Epoch:
    """An epoch over what a listing says, whatever happens to the folder meanwhile.

    Args:
        data: The folder.
        listing: What it held when the epoch began.
        classes: The class of each label.
        held_out: Share of samples to validate with.
        seed: Of the order.
        number: Of the epoch, from 0.
        shape: Of a sample.
        device: Where samples go.
    """

    def __init__(
        self,
        data: Path,
        listing: Listing,
        classes: Mapping[str, int],
        *,
        held_out: float,
        seed: int,
        number: int,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.listing, self.number = listing, number
        train, self.validate = listing.split(held_out)
        self.order = listing.order(train, seed, number)
        self._data, self._classes, self._shape, self._device = data, classes, shape, device
        folders = {str(Path(each.file).parent) for each in listing.samples}
        self._places = [data, data / LABELS, *(data / folder for folder in sorted(folders))]
        self._marks: list[int] | None = self._marked()
        self._told: set[str] = set()

    def read(self, rows: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, dict[int, str]]:
        """Return samples and their classes, and why some could not be read, by row.

        Raises:
            BadFile: If the whole folder is gone.
        """
        samples, classes, left_out = [], [], {}
        for row in rows:
            entry = self.listing.samples[row]
            try:
                samples.append(read_sample(self._data / entry.file, self._shape))
                classes.append(self._classes[entry.label])
            except Unreadable as err:
                left_out[row] = str(err)
        if left_out and not self._data.is_dir():
            raise BadFile(f"the data folder {self._data} is gone; bring it back, and the job goes on where it was")
        inputs = torch.stack(samples).to(self._device) if samples else None
        return inputs, torch.tensor(classes, dtype=torch.int64, device=self._device), left_out

    def changes(self) -> str:
        """Return what has changed in the folder since the epoch began, in words, once; empty if nothing has.

        Looks closer only where a folder's own time has changed, which adding, removing and renaming files does.
        """
        marks = self._marked()
        if marks == self._marks:
            return ""
        self._marks = marks
        try:
            found = self.listing.differences(Listing.scan(self._data).labelled(self._classes))
        except BadFile as err:
            found = str(err)
        fresh = found not in self._told and found
        self._told.add(found)
        return f"the data folder has changed ({found}); this epoch goes by what it held before" if fresh else ""

    def _marked(self) -> list[int]:
        return [_changed_ns(place) for place in self._places]


def _changed_ns(place: Path) -> int:
    try:
        return os.stat(place).st_mtime_ns
    except OSError:
        return -1
