"""Which prompts a model has room for, told from their lengths before anything runs."""

from collections.abc import Sequence

from kvweave.errors import PromptTooLong
from kvweave.models.adapter import Adapter
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_lab.eval.samples import Sample


def render(adapter: Adapter, sample: Sample) -> TokenizedPrompt:
    """A sample's prompt; raises PromptTooLong where the model has no room for it and its answer."""
    prompt = adapter.template.render(Prompt(sample.question, sample.chunks))
    try:
        adapter.check_length(prompt.tokens, sample.max_new_tokens)
    except PromptTooLong as error:
        raise PromptTooLong(f"{sample.name}: {error}") from error
    return prompt


def too_long(adapter: Adapter, samples: Sequence[Sample]) -> frozenset[str]:
    """The names of the samples that the model has no room for; raises PromptTooLong if it has room for none."""
    found = frozenset(sample.name for sample in samples if not _fits(adapter, sample))
    if samples and len(found) == len(samples):
        raise PromptTooLong(
            f"none of the {len(samples)} prompts fits the {adapter.geometry.context_tokens} tokens that"
            f" {adapter.fingerprint.name} takes, answer included; take a shorter context or another --model"
        )
    return found


def _fits(adapter: Adapter, sample: Sample) -> bool:
    try:
        render(adapter, sample)
    except PromptTooLong:
        return False
    return True
