"""Places for entries beside the disk: memory of device and host, a Redis server, an object store; and how they work together."""
