"""The base of all machines, made by `.ci/systemd`, and the package that is tried on them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nspawn.machine import SHARED, Machine, machine

CHECKOUT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def base() -> Path:
    """Return the folder of a Debian with systemd, or skip."""
    folder = CHECKOUT / ".container" / "systemd"
    if os.geteuid() != 0 or not folder.with_suffix(".made").is_file():
        pytest.skip("needs root and the Debian that .ci/systemd makes: make test-systemd")
    return folder


@pytest.fixture(scope="session")
def package() -> Path:
    """Return the newest package in dist/, or skip."""
    packages = sorted((CHECKOUT / "dist").glob("polythrottle_*.deb"), key=lambda file: file.stat().st_mtime)
    if not packages:
        pytest.skip("needs dist/polythrottle_….deb: make deb")
    return packages[-1]


@pytest.fixture(scope="session")
def next_package(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same package under a higher version."""
    folder = tmp_path_factory.mktemp("next")
    subprocess.run(["dpkg-deb", "--raw-extract", package, folder / "stage"], check=True)
    control = folder / "stage/DEBIAN/control"
    control.write_text(control.read_text().replace("\nArchitecture:", "+next\nArchitecture:", 1))
    built = folder / "next.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", folder / "stage", built], check=True, stdout=-3
    )
    return built


def install(made: Machine, package: Path) -> None:
    """Install a package as apt does once it has it."""
    copy = made.shared / "polythrottle.deb"
    copy.write_bytes(package.read_bytes())
    made.run("dpkg", "--install", f"{SHARED}/polythrottle.deb")


@pytest.fixture(scope="module")
def installed(base: Path, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Have a machine with the package, whose processor may be steered."""
    with machine(tmp_path_factory.mktemp("machine"), base) as made:
        install(made, package)
        yield made
