"""Puts into a wheel what lies beside the package in a checkout; all else about the build is in pyproject.toml.

An editable install needs none of it: penstock/base/home.py finds the checkout.
"""

from pathlib import Path
from shutil import copy2, copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

SECRETS = ignore_patterns(".env")  # deploy/.env has the passwords of the servers


class WithRecipes(build_py):
    """Builds the package with its recipes, deployments and templates."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib, "penstock", "shipped")
        shipped.mkdir(parents=True, exist_ok=True)
        copy2("prefect.yaml", shipped)
        for folder in ("configs", "deploy"):
            copytree(folder, shipped / folder, dirs_exist_ok=True, ignore=SECRETS)


setup(cmdclass={"build_py": WithRecipes})
