"""The only place where the parts meet."""
