"""The server as a process: where it listens, who may use it, its limits, logs and end."""
