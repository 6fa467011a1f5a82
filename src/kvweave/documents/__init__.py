"""From files to chunks with KV: read, cut, index, prepare."""
