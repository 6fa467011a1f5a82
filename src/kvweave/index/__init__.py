"""Documents in, chunks out: reading, cutting, indexing, searching."""
