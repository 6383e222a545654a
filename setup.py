"""Packages are found: `passes/` and `runtime/` lie beside `autopar/`, and are part of it."""

from setuptools import find_packages, setup

BESIDE = ("passes", "runtime")

setup(
    packages=[
        *find_packages(include=["autopar*"]),
        *(f"autopar.{name}" for name in find_packages(include=[f"{folder}*" for folder in BESIDE])),
    ],
    package_dir={"autopar": "autopar", **{f"autopar.{folder}": folder for folder in BESIDE}},
)
