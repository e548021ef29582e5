"""A wheel installed elsewhere: its entry points, its packages and the policies that ship."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpolicy", "flashinfer_ext", "engine_patches", "calib_cluster", "loadtest")
SHIPPED = "kvpolicy/shipped"

# Run from an empty folder with -S: no .pth file, so neither the checkout nor an editable install
# can be what is imported.
PROBE = """
import importlib, json, sys
from importlib.metadata import distribution, entry_points
own = distribution("raggedkv")
result = {"where": str(own.locate_file("")), "version": own.version, "path": sys.path}
result["entry_points"] = {}
for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
    for point in entry_points(group=group):
        if point.dist.name == "raggedkv":
            loaded = point.load()
            result["entry_points"][f"{group}:{point.name}"] = {
                "value": point.value,
                "callable": callable(loaded),
                "file": sys.modules[loaded.__module__].__file__,
            }
store = importlib.import_module("kvpolicy.store")
result["roots"] = [str(root) for root in store.search_roots()]
result["loadtest"] = importlib.import_module("loadtest.models").__file__
print("PROBE " + json.dumps(result))
"""


def python(*words: str, **options) -> subprocess.CompletedProcess[str]:
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    assert run.returncode == 0, run.stderr + run.stdout
    return run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a wheel is built from, plus one policy folder as a calibration writes it."""
    copy = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*FOLDERS, "artifacts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=skip)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy / path.name)
    policy = copy / "artifacts" / "model-x" / "policy-y" / "v0123"
    policy.mkdir(parents=True)
    (policy / "manifest.json").write_text("{}")
    (policy / "policy.safetensors").write_bytes(bytes(range(256)))
    state = copy / "artifacts" / ".calibration" / "model-x.policy-y"  # of a run: never shipped
    state.mkdir(parents=True, exist_ok=True)
    (state / "run.json").write_text("{}")
    return copy


def policy_files(source: Path) -> list[Path]:
    """Files of the policies, without the state of calibration runs."""
    root = source / "artifacts"
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if not path.relative_to(root).parts[0].startswith(".")]


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # the build backend of this environment: the test needs no network
    python(
        "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source),
        cwd=out,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture(scope="module")
def probe(target, tmp_path_factory) -> dict:
    """What a Python that has only the installed wheel (and its dependencies) sees."""
    paths = [str(target), sysconfig.get_path("purelib")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RAGGEDKV"))}
    env["PYTHONPATH"] = os.pathsep.join(paths)
    empty = tmp_path_factory.mktemp("elsewhere")
    output = python("-S", "-c", PROBE, cwd=empty, env=env).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("PROBE ")]
    result = json.loads(line.removeprefix("PROBE "))
    assert str(ROOT) not in result["path"]
    return result


def test_wheel_holds_our_packages_and_nothing_else(source, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licence = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert wheel.name == "raggedkv-0.1.0-py3-none-any.whl"
    assert len(licence) == 1
    expected = set()
    for folder in FOLDERS:  # data files too: one that setup.py forgets must fail here
        found = [path for path in (source / folder).rglob("*") if path.is_file()]
        kept = [path for path in found if path.suffix != ".md" and "results" not in path.parts]
        expected |= {str(path.relative_to(source)) for path in kept}
    for path in policy_files(source):
        expected.add(f"{SHIPPED}/{path.relative_to(source / 'artifacts')}")
    assert names == expected


def test_shipped_policies_arrive_byte_for_byte(source, target):
    files = policy_files(source)
    assert len(files) >= 2
    for path in files:
        installed = target / SHIPPED / path.relative_to(source / "artifacts")
        assert installed.read_bytes() == path.read_bytes()


def test_policy_store_searches_the_installed_policies(probe, target):
    assert str(target / SHIPPED) in probe["roots"]


def test_probe_saw_the_wheel(probe, target):
    assert Path(probe["where"]).resolve() == target.resolve()
    assert probe["version"] == "0.1.0"
    assert Path(probe["loadtest"]).is_relative_to(target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sglang.srt.plugins:raggedkv", "engine_patches.plugin:register"),
        ("sglang.srt.platforms:raggedkv_cpu", "engine_patches.cpu_platform:activate"),
    ],
)
def test_entry_point_loads_from_the_wheel(probe, target, name, value):
    point = probe["entry_points"][name]
    assert point["value"] == value and point["callable"]
    assert Path(point["file"]).is_relative_to(target)


def test_no_other_entry_points(probe):
    assert len(probe["entry_points"]) == 2
