"""Streams with one needle, as the engine reads them: keys of old blocks, and queries that choose.

Keys come from where recall digests what was sealed, queries from where it keeps those that are to
choose; both are looked at and not changed. Nothing here knows digests.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv import Engine, SamplingParams, Session, recall_digester
from streamkv.recall_bench import modes
from streamkv.recall_bench.question import ANSWER_START, ASKED, Question
from streamkv.recall_schedule import RecallSchedule, question_start


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What was seen of a stream when its answer was about to begin.

    Attributes:
        keys: of the blocks that could be chosen, [n, num_layers, num_kv_heads, block_size,
            head_dim], rotated by their offset in the block; in ordinary memory.
        queries: [num_layers, T, num_q_heads, head_dim], un-rotated, the newest.
        needle_blocks: those that hold a token of the needle.
        attended: blocks that recall attended to then; empty if it was not asked.
    """

    keys: Tensor
    queries: Tensor
    needle_blocks: frozenset[int]
    attended: frozenset[int] = frozenset()

    @property
    def is_needle(self) -> Tensor:
        """bool [n]."""
        return torch.tensor([index in self.needle_blocks for index in range(len(self.keys))])


def read_stream(engine: Engine, question: Question, num_blocks: int, is_answered: bool) -> Seen:
    """Read a stream, ask its question, and see what recall would choose from.

    Args:
        engine: with `recall_blocks`.
        question: with a needle that has left the window.
        num_blocks: that recall may choose.
        is_answered: let recall choose, too.
    """
    with _sealed_keys() as sealed:
        session = engine.session("digests")
        try:
            modes.switch(session, modes.WINDOW, num_blocks)
            session.feed([question.token_ids]).run()
            session.say(ASKED)
            session.feed(ANSWER_START).run()
            queries = _newest_queries(session)
            keys = torch.cat(sealed)[: _num_candidates(engine, session, num_blocks)]
            attended = _attended(session, num_blocks) if is_answered else frozenset()
        finally:
            session.delete()
    needle_blocks = frozenset(question.needle_blocks)
    assert max(needle_blocks) < len(keys)
    return Seen(keys.clone(), queries, needle_blocks, attended)


@contextmanager
def _sealed_keys() -> Iterator[list[Tensor]]:
    """Keys of all heads of every block that recall digests, in their order."""
    sealed: list[Tensor] = []
    own = recall_digester.block_digests

    def digest(pool: Tensor, block_ids: Tensor, kv_heads: Tensor) -> Tensor:
        sealed.append(pool[:, :, 0][block_ids].cpu())
        return own(pool, block_ids, kv_heads)

    recall_digester.block_digests = digest
    try:
        yield sealed
    finally:
        recall_digester.block_digests = own


def _newest_queries(session: Session) -> Tensor:
    """The queries that would choose now."""
    live = session._live
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    stream = live.executor.recaller._streams[live.sequence]
    queries: Tensor = stream.queries.before(live.sequence.num_computed).cpu()
    return queries


def _num_candidates(engine: Engine, session: Session, num_blocks: int) -> int:
    """Blocks that a choice for an answer is made from."""
    sequence = session._live.sequence
    schedule = RecallSchedule(engine.config.stride, num_blocks, sequence.block_size)
    begin = question_start(sequence.num_computed, sequence.block_size)
    num_sealed = sequence.num_computed // sequence.block_size
    return schedule.candidates(sequence.window, begin, num_sealed)


def _attended(session: Session, num_blocks: int) -> frozenset[int]:
    """Blocks that recall attends to for the first token of an answer."""
    modes.switch(session, modes.RECALL, num_blocks)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for _ in session.generate(params):
        pass
    block_size = session._live.sequence.block_size
    return frozenset(recalled.start // block_size for recalled in session.attended())


def candidates(streams: Sequence[Seen], index: int, most: int, seed: int) -> Tensor:
    """Blocks to choose from for one stream, as places in all streams' blocks: int64 [n].

    Its own first, in order, then others' in a drawn order. Others' first blocks are left out: a
    stream has one, which any head may look at for no reason of its own. So are others' needles.

    Args:
        streams: all.
        index: of the one.
        most: blocks at most, unless it has more of its own.
        seed: of the draw.
    """
    own: list[int] = []
    others: list[int] = []
    start = 0
    for place, stream in enumerate(streams):
        blocks = range(len(stream.keys))
        if place == index:
            own = [start + block for block in blocks]
        else:
            left_out = stream.needle_blocks | {0}
            others += [start + block for block in blocks if block not in left_out]
        start += len(stream.keys)
    generator = torch.Generator().manual_seed(seed + index)
    drawn = torch.tensor(others)[torch.randperm(len(others), generator=generator)]
    return torch.cat((torch.tensor(own), drawn[: max(0, most - len(own))]))
