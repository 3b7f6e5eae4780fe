"""A working directory whose environments other processes can import, as a user's would be."""

from tests.user_folder import in_this_folder as in_this_folder
