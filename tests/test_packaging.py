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
