"""The tiers of a store, local (device, host, disk) and remote (Redis, object store), and how they work together."""
