import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as a release would."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_the_catalogue(wheel: Path) -> None:
    """Boards, models, the page's style and the licence are inside, tests are not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("devices", "profiles/workloads"):
        for path in (ROOT / kind).glob("*.toml"):
            assert f"polythrottle/shipped/{kind}/{path.name}" in names
    assert "polythrottle/py.typed" in names
    assert "polythrottle/report/page.css" in names
    assert "polythrottle/testing/boards/jetson-nano.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests/") for name in names)


def needed(wheel: Path, role: str) -> set[str]:
    """Return the names of what an image is to have for a role."""
    script = ROOT / "packaging/containers/needed.py"
    done = subprocess.run([sys.executable, script, wheel, role], capture_output=True, text=True, check=True)
    return {re.split(r"[^\w.-]", line)[0] for line in done.stdout.splitlines()}


def test_each_image_has_what_its_role_needs_and_the_one_below(wheel: Path) -> None:
    """The actuator's next to nothing, the daemon's no torch, the tuner's everything and what it asks servers with."""
    actuator, daemon, tuner = (needed(wheel, role) for role in ("actuator", "daemon", "tuner"))
    assert actuator == {"numpy", "nvidia-ml-py", "tomli", "tomli-w", "typing-extensions"}
    assert actuator < daemon < tuner
    assert {"grpcio", "starlette", "typer", "uvicorn"} <= daemon
    assert tuner - daemon >= {"torch", "botorch", "gpytorch", "pandas", "matplotlib", "tritonclient"}
    assert not {"torch", "botorch", "gpytorch", "pandas", "matplotlib", "tritonclient", "ray"} & daemon
    assert "ray" not in tuner


@pytest.mark.parametrize(
    ("program", "role"),
    [
        ("polythrottle.actuation.server.main", "actuator"),
        ("polythrottle.actuation.restore", "actuator"),
        ("polythrottle.daemon.pods.kubelet_relay", "actuator"),
        ("polythrottle.cli.daemon_process", "daemon"),
        ("polythrottle.cli.commands", "daemon"),
    ],
)
def test_programs_begin_with_what_their_image_has(program: str, role: str) -> None:
    """No module that the image lacks is loaded as they start."""
    lacking = {"torch", "botorch", "gpytorch", "pandas", "matplotlib", "fsspec", "threadpoolctl", "PIL"}
    if role == "actuator":
        lacking |= {"typer", "rich", "starlette", "uvicorn", "h11", "prometheus_client", "psutil", "grpc", "textual"}
    code = f"import sys, {program}; print({lacking!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_an_installed_wheel_finds_its_catalogue(wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout, a simulated board is found and tuned."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import polythrottle;"
        "assert polythrottle.__file__.startswith(sys.path[0]);"
        "print(polythrottle.tune('sim:jetson-nano', 'mobilenetv2', trials=2, method='random').profile.device)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "sim:jetson-nano", done.stderr
