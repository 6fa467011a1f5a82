"""Which entries belong together, and which clusters a query asks for."""
