"""The natural benchmark: documents that people could have written, questions with evidence, contexts from the retriever."""
