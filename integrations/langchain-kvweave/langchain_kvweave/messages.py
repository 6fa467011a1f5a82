"""LangChain's messages and documents as kvweave takes them, and kvweave's answers as LangChain takes them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from kvweave.errors import InvalidRequest
from kvweave.local import answer_facts
from kvweave.results import Source
from kvweave.types import Message

if TYPE_CHECKING:
    from kvweave.local import Finished

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def message_from(message: BaseMessage) -> Message:
    """Return a message with its text; raises InvalidRequest for tools, images and other things that are no text."""
    if isinstance(message, AIMessage) and message.tool_calls:
        raise InvalidRequest("a message calls tools, which kvweave does not know; leave it out")
    return Message(_role(message), _text(message))


def _role(message: BaseMessage) -> Any:
    for kind, role in ((SystemMessage, "system"), (HumanMessage, "user"), (AIMessage, "assistant")):
        if isinstance(message, kind):
            return role
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return _ROLES[message.role]
    raise InvalidRequest(
        f"a message is of type {message.type!r}; kvweave takes system, human and AI messages alone"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in message.content]
    for part in parts:
        if part.get("type") not in ("text", "reasoning"):
            raise InvalidRequest(
                f"a message has a part of type {part.get('type')!r}; kvweave reads text alone"
            )
    return "".join(str(part.get("text", "")) for part in parts if part["type"] == "text")


def documents_from(given: Sequence[Document | str]) -> list[tuple[str, str]]:
    """Return names and texts of retrieved documents, in their order."""
    found = []
    for number, each in enumerate(given, 1):
        name = f"document {number}"
        if isinstance(each, str):
            found.append((name, each))
        else:
            found.append((str(each.id or each.metadata.get("source") or name), each.page_content))
    return found


def document_from(source: Source) -> Document:
    """Return a passage of a knowledge base as a document; its metadata say where it is."""
    facts = {name: value for name, value in asdict(source).items() if name not in ("document", "text")}
    return Document(
        page_content=source.text,
        id=f"{source.document}[{source.start}:{source.end}]",
        metadata={"source": source.document, **facts},
    )


def usage(finished: "Finished") -> UsageMetadata:
    """Return the tokens of a request; those whose stored KV was used count as read from a cache."""
    return UsageMetadata(
        input_tokens=finished.prompt_tokens,
        output_tokens=finished.completion_tokens,
        total_tokens=finished.prompt_tokens + finished.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=finished.cached_tokens),
    )


def metadata(finished: "Finished", model_name: str) -> dict[str, Any]:
    """Return what is known about an answer: why it ended, what was reused, and its sources."""
    return {
        "model_name": model_name,
        "model_provider": "kvweave",
        "finish_reason": finished.answer.finish_reason,
        "kvweave": answer_facts(finished),
    }
