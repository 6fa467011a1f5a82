"""What is likely to be asked next: the key content of the documents, the questions so far, and what follows from them."""
