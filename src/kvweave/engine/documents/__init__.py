"""Documents in: read, cut, embedded, prepared; and out: their text, their passages."""
