"""The MCP server: its tools, where they ask, how it is reached."""
