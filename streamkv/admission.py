"""Which sessions have room in the gpu pool, who waits for it, and who gives way. Pure: no clock.

    asleep --ask--> waiting --admit--> waking --woke--> awake --leave--> leaving --left--> asleep
                                                          ^---------stay---------'

A session is *awake* while its blocks are in the gpu pool, *asleep* while the tiers below hold them.
Who is asleep and has something to do waits in a queue, by priority, then by arrival; only its head
is admitted, so that a large session is not overtaken for ever. Where there is no room for the head,
sessions give way to it: those that rest, the longest first; then those that have computed a whole
turn since they woke, or are of a lower priority. So with more sessions at work than there is room
for they take turns, and nobody is asked twice within a turn.

Invariant: what is promised to sessions that are not asleep is at most the pool (`PoolRoom`); who is
asleep or waiting is promised nothing.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum

from streamkv.pool_room import PoolRoom

RESTING_S = 0.05
"""Who has done nothing for so long rests: between two tokens of an answer far less goes by."""


class State(Enum):
    """Where a session is on its way."""

    ASLEEP = "asleep"
    WAITING = "waiting"
    WAKING = "waking"
    AWAKE = "awake"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Guest:
    """What is known of one session.

    Attributes:
        num_blocks: that it needs while it is not asleep.
        priority: higher ones come first.
        state: where it is on its way.
        num_computed: tokens since it woke.
        used_s: when it last did something.
        must_stay: it could not be put to sleep, and has done nothing since.
    """

    num_blocks: int
    priority: int = 0
    state: State = State.ASLEEP
    num_computed: int = 0
    used_s: float = 0.0
    must_stay: bool = False


class Admission:
    """Room of one pool, given out in turns. For one thread, but for `position`.

    Args:
        room: of the pool; others may reserve and release in it, too.
        turn_tokens: tokens that a session computes at least before it gives way to another of its
            priority.
    """

    def __init__(self, room: PoolRoom, turn_tokens: int) -> None:
        self._room = room
        self._turn_tokens = turn_tokens
        self._guests: dict[Hashable, Guest] = {}
        self._in: dict[State, dict[Hashable, None]] = {state: {} for state in State}
        self._queue: list[Hashable] = []

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._guests

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def head(self) -> Hashable | None:
        """Who is admitted next."""
        return self._queue[0] if self._queue else None

    def state(self, owner: Hashable) -> State:
        """Where a session is on its way."""
        return self._guests[owner].state

    def owners(self, state: State) -> list[Hashable]:
        """Sessions in a state, in the order they came to it."""
        return list(self._in[state])

    def num_in(self, state: State) -> int:
        """How many sessions are in a state."""
        return len(self._in[state])

    def position(self, owner: Hashable) -> int | None:
        """Place in the queue, 1 for the head; `None` for who does not wait."""
        try:
            return self._queue.index(owner) + 1
        except ValueError:
            return None

    def add(self, owner: Hashable, num_blocks: int, priority: int = 0) -> None:
        """A session is asleep from now on."""
        assert owner not in self._guests and num_blocks <= self._room.num_blocks
        self._guests[owner] = Guest(num_blocks, priority)
        self._in[State.ASLEEP][owner] = None

    def remove(self, owner: Hashable) -> None:
        """A session has ended; what it was promised is free."""
        guest = self._guests.pop(owner, None)
        if guest is not None:
            del self._in[guest.state][owner]
            if guest.state is State.WAITING:
                self._queue.remove(owner)
        self._room.release(owner)

    def ask(self, owner: Hashable) -> None:
        """A session that is asleep has something to do."""
        guest = self._move(owner, State.ASLEEP, State.WAITING)
        behind = [at for at, other in enumerate(self._queue) if self._precedes(guest, other)]
        self._queue.insert(behind[0] if behind else len(self._queue), owner)

    def _precedes(self, guest: Guest, other: Hashable) -> bool:
        return guest.priority > self._guests[other].priority

    def withdraw(self, owner: Hashable) -> None:
        """A session that waits has nothing to do any more."""
        self._move(owner, State.WAITING, State.ASLEEP)
        self._queue.remove(owner)

    def admit(self) -> Hashable | None:
        """Promise the head its room; `None` if nobody waits, or there is no room yet."""
        if not self._queue:
            return None
        owner = self._queue[0]
        if not self._room.reserve(owner, self._guests[owner].num_blocks):
            return None
        del self._queue[0]
        self._move(owner, State.WAITING, State.WAKING).num_computed = 0
        return owner

    def woke(self, owner: Hashable, now_s: float) -> None:
        """The blocks of an admitted session are there."""
        guest = self._move(owner, State.WAKING, State.AWAKE)
        guest.used_s, guest.must_stay = now_s, False

    def did_not_wake(self, owner: Hashable) -> None:
        """The blocks of an admitted session could not be brought: it is asleep again."""
        self._move(owner, State.WAKING, State.ASLEEP)
        self._room.release(owner)

    def used(self, owner: Hashable, num_tokens: int, now_s: float) -> None:
        """A session that is awake has computed tokens, or was otherwise busy."""
        guest = self._guests[owner]
        guest.num_computed += num_tokens
        guest.used_s, guest.must_stay = now_s, False

    def leave(self, owner: Hashable) -> None:
        """A session that is awake begins to give its blocks up."""
        self._move(owner, State.AWAKE, State.LEAVING)

    def stay(self, owner: Hashable, *, must: bool) -> None:
        """A session does not leave after all.

        Args:
            owner: it.
            must: its blocks cannot be kept elsewhere; not asked again before it did something.
        """
        self._move(owner, State.LEAVING, State.AWAKE).must_stay = must

    def left(self, owner: Hashable) -> None:
        """The blocks of a session that was leaving are given back."""
        self._move(owner, State.LEAVING, State.ASLEEP)
        self._room.release(owner)

    def resize(self, owner: Hashable, num_blocks: int) -> None:
        """A session that is asleep needs other room from now on, at most the pool."""
        guest = self._guests[owner]
        assert guest.state is State.ASLEEP
        guest.num_blocks = min(num_blocks, self._room.num_blocks)

    def has_had_its_turn(self, owner: Hashable) -> bool:
        """Whether a session has computed a whole turn since it woke."""
        return self._guests[owner].num_computed >= self._turn_tokens

    def gives_way(self, owner: Hashable) -> bool:
        """Whether a session makes room for the head even if it has something to do."""
        if not self._queue:
            return False
        guest, head = self._guests[owner], self._guests[self._queue[0]]
        if guest.priority == head.priority:
            return self.has_had_its_turn(owner)
        return guest.priority < head.priority

    def is_short(self) -> bool:
        """Whether the head needs more room than is free or about to be."""
        if not self._queue:
            return False
        leaving = sum(self._guests[owner].num_blocks for owner in self._in[State.LEAVING])
        return self._room.num_free + leaving < self._guests[self._queue[0]].num_blocks

    def victims(self, now_s: float, is_busy: Callable[[Hashable], bool]) -> Iterator[Hashable]:
        """Who may give way to the head, the first to be asked first.

        Args:
            now_s: seconds of the clock by which sessions were used.
            is_busy: whether a session has something to do right now.
        """
        if not self._queue:
            return
        ranked = []
        for owner in self._in[State.AWAKE]:
            guest = self._guests[owner]
            if guest.must_stay:
                continue
            rests = not is_busy(owner) and now_s - guest.used_s >= RESTING_S
            if rests or self.gives_way(owner):
                by_use = guest.used_s if rests else -float(guest.num_computed)
                ranked.append((not rests, guest.priority, by_use, owner))
        for *_, owner in sorted(ranked, key=lambda each: each[:3]):
            yield owner

    def may_free_more(self, is_busy: Callable[[Hashable], bool]) -> bool:
        """Whether waiting may bring the head room, though nobody can be asked now."""
        if self._in[State.LEAVING] or self._in[State.WAKING]:
            return True
        awake = self._in[State.AWAKE]
        return any(is_busy(owner) or not self._guests[owner].must_stay for owner in awake)

    def resting(self, now_s: float, after_s: float) -> list[Hashable]:
        """Who is awake and has done nothing for so long, and may sleep."""
        guests = ((owner, self._guests[owner]) for owner in self._in[State.AWAKE])
        return [
            owner
            for owner, guest in guests
            if not guest.must_stay and now_s - guest.used_s >= after_s
        ]

    def _move(self, owner: Hashable, before: State, after: State) -> Guest:
        guest = self._guests[owner]
        assert guest.state is before, f"{owner} is {guest.state.value}, not {before.value}"
        del self._in[before][owner]
        self._in[after][owner] = None
        guest.state = after
        return guest

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        for owner, guest in self._guests.items():
            has_room = guest.state in (State.WAKING, State.AWAKE, State.LEAVING)
            promised = self._room.promised(owner)
            assert promised >= guest.num_blocks if has_room else promised == 0, owner
            assert (guest.state is State.WAITING) == (owner in self._queue), owner
            assert owner in self._in[guest.state], owner
        assert len(set(self._queue)) == len(self._queue)
        assert sum(map(len, self._in.values())) == len(self._guests)
        priorities = [self._guests[owner].priority for owner in self._queue]
        assert priorities == sorted(priorities, reverse=True)
