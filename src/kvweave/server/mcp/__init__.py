"""The MCP server: its tools, their source of answers, and its transports."""
