"""Where what people read and change lies: recipes, the deployments, templates of pools.

In a checkout that is its top, in a wheel a folder of the package (setup.py). Left out: code, which Python finds.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "shipped"
HOME = SHIPPED if SHIPPED.is_dir() else PACKAGE.parent
RECIPES = HOME / "configs"


def working_folder() -> Path:
    """Return where the runs of deployments begin: in the checkout, or where a person with a wheel deploys them."""
    return Path.cwd() if HOME == SHIPPED else HOME


def shipped_recipe(path: Path) -> Path:
    """Return where a recipe lies: at its path, else that of the same name among those that come with Penstock."""
    ours = HOME / path
    if path.exists() or not ours.resolve().is_relative_to(RECIPES) or not ours.is_file():
        return path
    return ours
