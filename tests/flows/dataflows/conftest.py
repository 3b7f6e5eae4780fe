"""The folder of these tests is the working directory, as a user's would be: its modules are named in recipes."""

from __future__ import annotations

from tests.user_folder import in_this_folder

__all__ = ["in_this_folder"]
