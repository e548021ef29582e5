"""Packages of the distribution; everything else is in pyproject.toml.

``artifacts/`` (policies that ship: data, no code) is installed as ``kvpolicy/shipped``, where
``kvpolicy.store`` looks when there is no checkout.
"""

from setuptools import find_packages, setup

FOLDERS = ["kvpolicy", "flashinfer_ext", "engine_patches", "calib_cluster", "loadtest"]

setup(
    packages=[
        *find_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")]),
        "kvpolicy.shipped",
    ],
    package_dir={"kvpolicy.shipped": "artifacts"},
    package_data={"kvpolicy.shipped": ["**/*"]},
    include_package_data=False,
)
