"""Folders that get another name between two boots, or two reads."""

import errno

from polythrottle.testing.kernel.machine import Machine, refusal


def renumber(machine: Machine, path: str, name: str) -> None:
    """Rename the folder that a link in ``/sys/class`` leads to, and the links to it.

    Args:
        machine: Whose tree.
        path: The link, such as ``/sys/class/hwmon/hwmon3``.
        name: What it is called then; another folder of that name takes the old one's place.

    Raises:
        OSError: If there is no such link.
    """
    folder, _, old = path.rpartition("/")
    if not machine.has(path):
        raise refusal(errno.ENOENT, path)
    if machine.has(f"{folder}/{name}"):
        _move(machine, folder, name, f"{name}-moving")
        _move(machine, folder, old, name)
        _move(machine, folder, f"{name}-moving", old)
    else:
        _move(machine, folder, old, name)


def _move(machine: Machine, folder: str, old: str, name: str) -> None:
    link = machine.place(f"{folder}/{old}")
    real = machine.place(machine.inside(f"{folder}/{old}"))
    target = str(link.readlink())
    real.rename(real.with_name(name))
    link.unlink()
    machine.place(f"{folder}/{name}").symlink_to(f"{target.rpartition('/')[0]}/{name}")
    short = real.parent.parent / "devfreq_dev"
    if short.is_symlink():
        short.unlink()
        short.symlink_to(f"devfreq/{name}")
