"""Answers for tests of what is made of them."""

from streamkv.recall_bench.answers import Answer


def answer(
    *,
    length: int = 1024,
    index: int = 0,
    depth: float = 0.1,
    mode: str = "window",
    fed_in: str = "window",
    found: bool = True,
    beyond_window: bool = False,
    recalled: bool | None = None,
    feed_s: float = 1.0,
) -> Answer:
    """An answer of eight tokens in half a second; `recalled` tells about 16 recalled blocks."""
    return Answer(
        length=length,
        index=index,
        depth=depth,
        number="43432",
        source="a.md",
        source_token=7,
        needle_start=100,
        needle_end=114,
        mode=mode,
        fed_in=fed_in,
        text=" 43432." if found else " é1.",
        found=found,
        beyond_window=beyond_window,
        feed_s=feed_s,
        feed_tokens=length,
        answer_s=0.5,
        answer_tokens=8,
        recalled_blocks=None if recalled is None else 16,
        needle_recalled=recalled,
    )
