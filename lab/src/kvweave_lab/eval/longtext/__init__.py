"""Long texts for decoding, whose questions need evidence from long before."""
