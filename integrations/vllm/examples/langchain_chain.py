"""A LangChain chain whose retriever's documents are chunks for kvweave inside vLLM.

    pip install langchain-core openai
    python langchain_chain.py Qwen/Qwen2.5-1.5B-Instruct "Who repairs the kiln?" --url http://127.0.0.1:8000/v1

The model's name is the served one, by which its tokenizer is found too. Any retriever will do; this one, in memory, ranks documents
by the words that they share with the question.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda
from openai import OpenAI
from transformers import AutoTokenizer

import kvweave_vllm

DOCUMENTS = [
    Document(
        "The kiln in the yard is repaired by Osgood, who comes on the first Monday of a month.", id="kiln"
    ),
    Document("The ferry leaves at nine and at four. A ticket costs five crowns.", id="ferry"),
    Document("Irma keeps the keys of the mill. The mill closes on Friday at noon.", id="mill"),
]


class WordRetriever(BaseRetriever):
    """Finds the `k` documents that share most words with the question."""

    documents: list[Document]
    k: int = 2

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        words = set(query.lower().strip("?").split())
        return sorted(self.documents, key=lambda each: -len(words & set(each.page_content.lower().split())))[
            : self.k
        ]


class KvweaveVllm:
    """A vLLM server with kvweave: prepares documents once, and answers questions about retrieved ones."""

    def __init__(self, client: OpenAI, tokenizer: Any, model: str, **options: Any) -> None:
        self._client, self._tokenizer, self._options = client, tokenizer, {"model": model, **options}

    def prepare(self, documents: Sequence[Document], **options: Any) -> None:
        """Store the KV of each document; give `embed=` your retriever's vectors, or install kvweave[kb]."""
        for document in documents:
            bodies = kvweave_vllm.preparations(
                self._tokenizer, [document.page_content], **{**options, "model": self._options["model"]}
            )
            for body in bodies:
                self._client.completions.create(**body)

    def answer(self, question: str, documents: Sequence[Document], **options: Any) -> str:
        """Return the answer; each document is a chunk, and its KV is reused wherever it comes in the prompt."""
        texts = [document.page_content for document in documents]
        body = kvweave_vllm.request(self._tokenizer, texts, question, **{**self._options, **options})
        return self._client.completions.create(**body).choices[0].text.strip()


def chain_of(retriever: BaseRetriever, served: KvweaveVllm) -> Runnable[str, str]:
    """Return a chain from a question to its answer."""
    return RunnableLambda(lambda question: served.answer(question, retriever.invoke(question)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the documents and answer one question."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--tokenizer", help="folder or name; by default the model's")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--recipe", default="prophetkv", help="which needs no embeddings; see README.md")
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    client = OpenAI(base_url=args.url, api_key="none")
    served = KvweaveVllm(client, tokenizer, args.model, recipe=args.recipe, max_tokens=40, temperature=0)
    served.prepare(DOCUMENTS, recipe=args.recipe)
    print(chain_of(WordRetriever(documents=DOCUMENTS), served).invoke(args.question))


if __name__ == "__main__":
    main()
