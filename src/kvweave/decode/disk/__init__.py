"""Where clusters lie on flash and how they are read and written."""
