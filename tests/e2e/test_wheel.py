"""The built wheel, in an environment that knows nothing of this repository."""

import json
import os
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from elias.config import preset_names

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*command, **options):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [str(part) for part in command],
        env={**environment, "NUMBA_DISABLE_JIT": "1"},  # compiling takes longer than all else here
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(*(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The commands of an environment with the wheel, and what it needs from this one's packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    commands = folder / "bin"
    packages = run(commands / "python", "-c", "import site; print(*site.getsitepackages())")
    needed = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    # a path in a .pth is not searched for .pth files, so an editable install here stays unseen
    (Path(packages.strip()) / "needed.pth").write_text("\n".join(needed))
    run(
        *(sys.executable, "-m", "pip", "--python", commands / "python", "install"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
    )
    return commands


def test_the_wheel_holds_the_presets_the_marker_of_types_and_the_licence(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {f"elias/presets/{name}.toml" for name in preset_names()} <= names
    assert "elias/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests") for name in names)


def test_the_installed_command_prints_its_version_and_presets(installed, tmp_path):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    result = run(installed / "elias", "--version", cwd=tmp_path)
    presets = json.loads(run(installed / "elias", "presets", "--json", cwd=tmp_path))
    path = run(installed / "python", "-c", "import elias; print(elias.__file__)", cwd=tmp_path)

    assert result == f"elias {version}\n"
    assert list(presets) == preset_names()
    assert path.startswith(str(installed.parent))


def test_the_installed_command_trains_and_predicts(installed, tmp_path):
    small = ["--set", "encoder.dim=8", "--set", "stages.stage1.epochs=1"]
    small += ["--set", "stages.stage2.epochs=1", "--device", "cpu"]

    run(installed / "elias", "data", "synthetic", "c", "--points", 80, "--labels", 30, cwd=tmp_path)
    run(installed / "elias", "train", "c", "--out", "run", *small, cwd=tmp_path)
    line = run(installed / "elias", "predict", "run", "-k", 2, cwd=tmp_path, input="a text\n")

    assert len(json.loads(line)["labels"]) == 2
