"""A sequence changes what it attends to: `window`, `recall` or `full`.

Everything that can be refused is refused before anything has changed.
"""

from streamkv.config import Attention, require_int
from streamkv.errors import ConfigError
from streamkv.full_attention import FullAttention
from streamkv.recaller import Recaller
from streamkv.sequence import Sequence


def switch_attention(
    sequence: Sequence,
    mode: Attention,
    recall_blocks: int | None,
    recaller: Recaller | None,
    full: FullAttention | None,
) -> None:
    """Attend by `mode` from the next token on; nothing of the sequence may be under way.

    Args:
        sequence: stays as it is if this raises.
        mode: to go on in.
        recall_blocks: old blocks recalled at once; `None`: as many as the engine has room for.
        recaller, full: of the engine.

    Raises:
        ConfigError: the engine cannot, or `recall_blocks` is out of range.
        PoolFullError: `full`, and the gpu pool has no room for the whole stream.
        AbsentBlockError: `full`, and no tier has one of its blocks.
        JournalError: it could not be written.
    """
    _check(mode, recall_blocks, recaller)
    if mode == "full":
        assert full is not None
        if not full.is_on(sequence):
            full.turn_on(sequence, lambda: _follow(sequence, recaller))
        return
    num_blocks = recall_blocks or (recaller.options.num_blocks if recaller is not None else 0)
    if full is not None and full.is_on(sequence):
        full.turn_off(sequence, mode, num_blocks)
        _follow(sequence, recaller)
    elif recaller is not None:
        recaller.turn(sequence, mode, num_blocks)
        if full is not None:
            full.follow(sequence)


def _check(mode: Attention, recall_blocks: int | None, recaller: Recaller | None) -> None:
    if mode == "full" and recall_blocks is not None:
        problem = "mode 'full' attends to every block"
        raise ConfigError("recall_blocks", recall_blocks, problem, "Leave it out.")
    if recaller is None:
        if mode == "recall":
            remedy = (
                "Open the engine with recall_blocks, for example EngineConfig(recall_blocks=16)."
            )
            raise ConfigError("mode", mode, "the engine has no room for recalled blocks", remedy)
    elif recall_blocks is not None:
        require_int("recall_blocks", recall_blocks, 1, recaller.options.num_blocks)


def _follow(sequence: Sequence, recaller: Recaller | None) -> None:
    if recaller is not None:
        recaller.follow(sequence)
