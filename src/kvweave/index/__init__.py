"""Documents in, chunks out: read files, split them into chunks, index and search them."""
