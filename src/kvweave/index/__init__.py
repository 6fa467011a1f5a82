"""The list of documents and chunks, and search among the chunks."""
