"""Records by which the modes of a stream go on, under salts of their own. Pure.

A salt names blocks apart that were computed from the same tokens in another way: in another mode,
with other choices, or in a fork that is about to go its own way.
"""

import secrets
from dataclasses import replace

from streamkv.journal_records import Chosen, ModeSet
from streamkv.recall_history import RecallHistory


def new_salt() -> bytes:
    """A salt that no other stream has."""
    return secrets.token_bytes(16)


def under_other_salts(history: RecallHistory, at: int) -> list[ModeSet | Chosen]:
    """Records by which modes and choices go on from token `at` as they are, named apart."""
    records = list[ModeSet | Chosen]()
    if not history.has_salt:
        return records
    first, in_force = history.mode_at(at), history.choice_at(at)
    modes = [*([first] if first is not None else []), *history.modes(at + 1)]
    for place, mode in enumerate(modes):
        start = max(at, mode.token_index)
        end = modes[place + 1].token_index if place + 1 < len(modes) else None
        salt = new_salt() if mode.salt else b""
        records.append(replace(mode, token_index=start, salt=salt))
        if place == 0 and in_force is not None and in_force.token_index < at:
            records.append(replace(in_force, token_index=at))
        records.extend(history.choices(start, end))
    return records


def after_rewind(history: RecallHistory, unset: ModeSet, num_tokens: int) -> list[ModeSet | Chosen]:
    """Records to be written behind the one that a stream ends at `num_tokens` again.

    What was decided before goes on under another salt, in the mode that the session is in.

    Args:
        history: before the rewind; stays as it is.
        unset: the mode of a stream that never had one.
        num_tokens: that are left.
    """
    left, newest, last = history.copy(), history.newest or unset, num_tokens - 1
    lost = left.rewind(num_tokens)
    records = under_other_salts(left, last if lost is None else min(last, lost))
    mode = left.newest or unset
    if (newest.mode, newest.num_blocks) != (mode.mode, mode.num_blocks):
        records.append(replace(newest, token_index=last, salt=new_salt()))
    return records
