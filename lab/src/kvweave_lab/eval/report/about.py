"""What a reader has to know to judge an evaluation's figures and to get them again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    """One run of an evaluation.

    Attributes:
        model: as the user named it.
        dtype: of the weights and of the KV.
        device: where the model ran.
        split: pool of the generated samples, or the file that samples were read from.
        seeds: of the generated samples; empty for samples from a file.
        samples: generated prompts of one task, one length and one seed; or as many of each file, None for all.
        left_out: prompts that were not run because the model has no room for them.
        chunk_tokens: the largest chunk.
        context_tokens: lengths that samples were made for; empty for samples from a file.
        command: repeats the run when pasted into a shell.
        date: day of the run, ISO 8601.
        version: of kvweave.
        minutes: time that the outcomes took, in all the runs that an interrupted evaluation came by them; where several
            processes answered, all their minutes together.
    """

    model: str
    dtype: str
    device: str
    split: str
    seeds: tuple[int, ...]
    samples: int | None
    left_out: int
    chunk_tokens: int
    context_tokens: tuple[int, ...]
    command: str
    date: str
    version: str
    minutes: float
