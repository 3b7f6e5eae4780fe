"""An MCP server over stdin and stdout, by the protocol's own library: sums, a mistake, and its own end."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Go wrong."""
    raise LookupError("no such thing")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if len(sys.argv) > 1:

    @server.tool(name=sys.argv[1])
    def named() -> str:
        """Say what process this is."""
        return str(os.getpid())


server.run("stdio")
