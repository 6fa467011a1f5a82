"""One file per method; METHODS maps names to recipes."""
