"""Environments that a recipe names, as a file in the working folder describes them: what is run, or where it is.

A recipe may come from a form, so it names them and cannot bring any: what is run belongs to whoever owns the folder.
Left out: what the entries say (penstock/environments/mcp.py, openenv_servers.py, verifiers.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.base.names import nearest_name


@dataclass(frozen=True)
class NamedIn:
    """A kind of environment that a file describes.

    Attributes:
        file: its name, in the working folder.
        key: under which the file has entries by name.
        kind: what one of them is, for messages.
        example: an entry, for messages.
    """

    file: str
    key: str
    kind: str
    example: str

    def entry(self, name: str) -> dict[str, Any]:
        """Return what the file says of a name.

        Raises:
            UserError: there is no such file or entry, or the file is not laid out as it has to be.
        """
        described = self._described()
        if name not in described:
            near = nearest_name(name, described)
            raise UserError(
                f"{self.file} has no {self.kind} '{name}'" + (f" (did you mean '{near}'?)" if near else ""),
                f"it has {', '.join(described) or 'none'}",
            )
        entry: dict[str, Any] = described[name]
        return entry

    def _described(self) -> dict[str, Any]:
        path = Path(self.file).resolve()
        remedy = f'write {{"{self.key}": {{"NAME": {self.example}}}}} into {path}'
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))[self.key])
        except FileNotFoundError:
            raise UserError(f"there is no {path}, which says what {self.kind}s there are", remedy) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} does not name {self.kind}s: {type(error).__name__}: {error}", remedy) from error
