"""Megatron-Core's layouts of pipelines: a text of the layers of every chunk, in their order.

    E embedding, t layer, m module that predicts a further token, L head with the loss
    |          ends a chunk; chunk i is on stage i modulo the stages
    x*3, (..)*3  repeats a letter, or what is in brackets; commas are ignored

Source: NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re

from autopar.errors import UsageError

LETTERS = "EtmL"
_REPEATED = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|]))\*(\d+)")
LONGEST = 1 << 16
"""The most letters of a layout."""


def chunks_of(text: str) -> tuple[str, ...]:
    """Return the letters of every chunk.

    >>> chunks_of("Et*2|(tt|)*2,mL")
    ('Ett', 'tt', 'tt', 'mL')
    """
    spelled = text.replace(",", "").replace(" ", "")
    while match := _REPEATED.search(spelled):
        count = int(match[3])
        once = match[1] if match[2] is None else match[2]
        # The text may come from a file of anyone.
        if len(match[3]) > 5 or count * len(once) > LONGEST:
            raise UsageError(f"the pipeline layout {text!r} has more than {LONGEST} letters")
        spelled = spelled[: match.start()] + once * count + spelled[match.end() :]
    wrong = sorted(set(spelled) - {*LETTERS, "|"})
    if wrong:
        raise UsageError(
            f"the pipeline layout {text!r} has {wrong[0]!r}; its letters are {', '.join(LETTERS)}, "
            "with | between chunks, and ()*n around what is repeated"
        )
    return tuple(spelled.split("|"))


def check(chunks: tuple[str, ...], *, layers: int, further: int, pipeline: int) -> None:
    """Require that the chunks have the model's layers, both ends, and a place on every stage."""
    letters = "".join(chunks)
    if len(chunks) % pipeline:
        raise UsageError(f"a layout of {len(chunks)} chunks does not go over {pipeline} stages")
    for letter, wanted, what in (
        ("t", layers, "layers"),
        ("E", 1, "embeddings"),
        ("L", 1, "heads"),
    ):
        if letters.count(letter) != wanted:
            raise UsageError(
                f"the pipeline layout has {letters.count(letter)} {what}, the model {wanted}"
            )
    if letters.count("m") not in (0, further):
        raise UsageError(
            f"the pipeline layout has {letters.count('m')} modules for further tokens, the model "
            f"{further}"
        )
    if not letters.startswith("E") or not letters.endswith("L"):
        raise UsageError(
            "a pipeline layout begins with E, the embedding, and ends with L, the head"
        )


def even(
    layers: int, chunks: int, *, embedding: bool = False, loss: bool = False
) -> tuple[str, ...]:
    """Return equal chunks, in which an embedding and a loss may count as layers.

    Source: the same repository, --account-for-embedding-in-pipeline-split and its like.

    >>> even(6, 4, embedding=True, loss=True)
    ('Et', 'tt', 'tt', 'tL')
    """
    whole = layers + embedding + loss
    if whole % chunks:
        raise UsageError(f"{whole} layers, with the ends that count, do not make {chunks} chunks")
    counts = [whole // chunks] * chunks
    counts[0] -= embedding
    counts[-1] -= loss
    return _spelled(counts)


def ended(layers: int, stages: int, *, first: int | None, last: int | None) -> tuple[str, ...]:
    """Return stages of one chunk, of which the first and the last have numbers of their own.

    >>> ended(8, 3, first=2, last=None)
    ('Ett', 'ttt', 'tttL')
    """
    given = [count for count in (first, last) if count is not None]
    others = stages - len(given)
    rest = layers - sum(given)
    if rest < 0 or others < 0 or (rest if not others else rest % others):
        raise UsageError(
            f"{layers} layers do not make {stages} stages with {first} on the first and {last} on "
            "the last"
        )
    counts = [rest // others if others else 0] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return _spelled(counts)


def _spelled(counts: list[int]) -> tuple[str, ...]:
    chunks = ["t" * count for count in counts]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "L"
    return tuple(chunks)
