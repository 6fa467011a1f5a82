"""The MCP server: its tools and transports, and their source of answers."""
