"""What drives servers over HTTP: their processes, traffic, a client, and the comparison, soak and costs that use them."""
