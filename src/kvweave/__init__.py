"""kvweave: answers over your own documents that never compute the same thing twice."""
