"""Puts sessions to sleep and wakes them, as `Admission` decides; for the engine's thread only.

    when_awake    what is to be done with a session's blocks waits here until they are there
    advance       one round: who has arrived goes on, who has left makes room, who is next is let in
    hold          the session stays as it is, awake or asleep, until it is released

Nothing here waits: a round begins what can begin and looks at what was begun before, while steps of
other sessions go on.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field

from streamkv.admission import Admission, State
from streamkv.errors import PoolFullError
from streamkv.sequence import Sequence
from streamkv.sleeping import Sleeper

Clock = Callable[[], float]

STORED_LOOK_S = 0.05
"""How often it is looked for whether those who fell asleep have been stored."""


@dataclass(slots=True, eq=False)
class Waiter:
    """Something to be done once a session is awake.

    Attributes:
        then: does it; raises nothing.
        fail: called instead with the reason why it cannot be.
        is_wanted: whether anybody still waits for it.
        asked_s: since when it waits.
    """

    then: Callable[[], None]
    fail: Callable[[BaseException], None]
    is_wanted: Callable[[], bool]
    asked_s: float


@dataclass(slots=True, eq=False)
class _Sleepy:
    """A session that can sleep."""

    name: str
    sequence: Sequence
    sleeper: Sleeper
    waiters: list[Waiter] = field(default_factory=list)
    holds: int = 0

    @property
    def is_held(self) -> bool:
        """Whether somebody else has its blocks in hand."""
        return self.holds > 0 or self.sequence.holds > 0


class Sleepers:
    """All sessions of an engine that can sleep.

    Args:
        admission: whose turn it is.
        sleep_after_s: seconds after which a session that rests is put to sleep unasked; `None`:
            only when another one needs its room.
        clock: seconds.

    Attributes:
        num_slept, num_woken: how often sessions fell asleep and woke, since the start.
        queue_s: called with the seconds that something waited for its session to wake.
    """

    def __init__(
        self,
        admission: Admission,
        sleep_after_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._admission = admission
        self._sleep_after_s = sleep_after_s
        self._clock = clock
        self._sessions: dict[Sequence, _Sleepy] = {}
        self._by_name: dict[Hashable, _Sleepy] = {}
        self._newcomers: dict[Hashable, Future[None]] = {}
        self._busy: defaultdict[Sequence, int] = defaultdict(int)
        self._unstored: dict[_Sleepy, None] = {}
        self._looked_s = -STORED_LOOK_S
        self.num_slept = 0
        self.num_woken = 0
        self.queue_s: Callable[[float], None] = lambda seconds: None

    @property
    def has_business(self) -> bool:
        """Whether rounds are to be gone through though no step is under way."""
        admission = self._admission
        return admission.head is not None or any(
            admission.num_in(state) for state in (State.WAKING, State.LEAVING)
        )

    @property
    def next_look_s(self) -> float | None:
        """Seconds until somebody may have rested long enough, or be stored; `None`: nobody is."""
        looks = [STORED_LOOK_S] if self._unstored else []
        if self._sleep_after_s is not None and self._admission.num_in(State.AWAKE):
            looks.append(max(0.01, self._sleep_after_s / 4))
        return min(looks, default=None)

    def add(self, name: str, sequence: Sequence, sleeper: Sleeper) -> None:
        """A session that entered is open."""
        session = _Sleepy(name, sequence, sleeper)
        self._sessions[sequence] = self._by_name[name] = session
        if self._admission.state(name) is State.ASLEEP and sleeper.asleep is None:
            sleeper.begin_asleep()

    def status(self, sequence: Sequence) -> tuple[str, int | None]:
        """`awake`, `asleep`, `waiting` and so on, and the place in the queue; from any thread."""
        session = self._sessions.get(sequence)
        if session is None or session.name not in self._admission:
            return State.ASLEEP.value, None
        return (
            self._admission.state(session.name).value,
            self._admission.position(session.name),
        )

    def count(self) -> dict[str, int]:
        """How many sessions are in each state; from any thread."""
        return {state.value: self._admission.num_in(state) for state in State}

    def remove(self, name: str) -> None:
        """A session has ended, with nothing of it under way, or is not opened after all."""
        session = self._by_name.pop(name, None)
        if session is not None:
            self._unstored.pop(session, None)
            del self._sessions[session.sequence]
            self._busy.pop(session.sequence, None)
        self._newcomers.pop(name, None)
        self._admission.remove(name)

    def enter(
        self, name: str, num_blocks: int, priority: int = 0, *, has_blocks: bool
    ) -> "Future[None]":
        """A session is about to be opened; `add` or `remove` follows.

        Args:
            name: the session's name.
            num_blocks: that it needs while it is awake; at most the pool.
            priority: higher ones come first.
            has_blocks: it has blocks to begin with; else it may as well begin asleep.

        Returns:
            done once it has room, or is asleep and needs none.
        """
        future: Future[None] = Future()
        admission = self._admission
        admission.add(name, num_blocks, priority)
        admission.ask(name)
        self._newcomers[name] = future
        self._admit()
        if not has_blocks and not future.done():
            del self._newcomers[name]
            admission.withdraw(name)
            future.set_result(None)
        return future

    def is_awake(self, sequence: Sequence) -> bool:
        """Whether a session's blocks are there; also of one that is not known here."""
        session = self._sessions.get(sequence)
        return session is None or self._admission.state(session.name) is State.AWAKE

    def is_asleep(self, sequence: Sequence) -> bool:
        """Whether a session's blocks are below, and nothing is being done about it."""
        session = self._sessions.get(sequence)
        return session is not None and self._admission.state(session.name) is State.ASLEEP

    def when_awake(
        self,
        sequence: Sequence,
        then: Callable[[], None],
        fail: Callable[[BaseException], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Do something once a session is awake; at once if it is.

        Args:
            sequence: of the session.
            then: does it.
            fail: called instead with the reason why it cannot be.
            is_wanted: whether anybody still waits for it; if nobody does, it is forgotten.
        """
        session = self._sessions.get(sequence)
        if session is None:
            then()
            return
        name, admission = session.name, self._admission
        if admission.state(name) is State.LEAVING and not admission.gives_way(name):
            self._stay(session)
        if admission.state(name) is State.AWAKE:
            admission.used(name, 0, self._clock())
            then()
            return
        if admission.state(name) is State.ASLEEP:
            admission.ask(name)
        session.waiters.append(Waiter(then, fail, is_wanted, self._clock()))

    def is_at_work(self, sequence: Sequence) -> bool:
        """Whether `when_awake` would do it at once: a session that is awake is used, then."""
        session = self._sessions.get(sequence)
        if session is None:
            return True
        if self._admission.state(session.name) is not State.AWAKE:
            return False
        self._admission.used(session.name, 0, self._clock())
        return True

    def when_settled(self, sequence: Sequence, then: Callable[[], None]) -> None:
        """Do something once a session is awake or asleep, whichever is sooner; nobody wants it."""
        session = self._sessions.get(sequence)
        if session is not None:
            match self._admission.state(session.name):
                case State.WAKING:
                    settled = Waiter(then, lambda error: then(), lambda: True, self._clock())
                    session.waiters.append(settled)
                    return
                case State.WAITING:
                    self._admission.withdraw(session.name)
                    session.waiters.clear()
                case State.LEAVING:
                    self._stay(session)
                case _:
                    pass
        then()

    def wait_for_turn(
        self,
        sequence: Sequence,
        then: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Go on with something once a session that is leaving is awake again."""
        session = self._sessions[sequence]
        session.waiters.append(Waiter(then, fail, lambda: True, self._clock()))

    def begin_job(self, sequence: Sequence) -> None:
        """A session has something to compute."""
        self._busy[sequence] += 1

    def end_job(self, sequence: Sequence) -> None:
        """It is done, or will not be."""
        self._busy[sequence] -= 1
        if self._busy[sequence] == 0:
            del self._busy[sequence]
        self._note_use(sequence, 0)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens of a session were computed."""
        self._note_use(sequence, num_tokens)

    def hold(self, sequence: Sequence) -> None:
        """Leave a session as it is, awake or asleep, until it is released as often."""
        session = self._sessions.get(sequence)
        if session is None:
            return
        session.holds += 1
        if self._admission.state(session.name) is State.LEAVING:
            self._stay(session)

    def release(self, sequence: Sequence) -> None:
        """Undo a hold."""
        session = self._sessions.get(sequence)
        if session is not None:
            session.holds -= 1
            if self._admission.state(session.name) is State.AWAKE:
                self._admission.used(session.name, 0, self._clock())

    def advance(
        self, may_leave: Callable[[Sequence], bool], interrupt: Callable[[Sequence], None]
    ) -> bool:
        """One round.

        Args:
            may_leave: whether nothing of a sequence is under way on the device; called for one
                that is about to leave.
            interrupt: takes what a sequence has to compute out of the queue of steps, to go on when
                it is awake again.

        Returns:
            Whether anything changed.
        """
        self._journal_what_is_stored()
        changed = self._end_leaving()
        changed |= self._end_waking()
        changed |= self._withdraw_unwanted()
        changed |= self._admit()
        changed |= self._make_room(may_leave, interrupt)
        changed |= self._put_to_sleep(may_leave)
        return changed

    def wait_for_copies(self) -> bool:
        """With nothing else to do: wait for the next session that wakes, if that is soon."""
        waking = self._admission.owners(State.WAKING)
        return bool(waking) and self._by_name[waking[0]].sleeper.wait_for_copies()

    def close(self, error: BaseException) -> None:
        """The engine ends: whoever waits is told, what was begun is stopped."""
        for future in self._newcomers.values():
            if not future.done():
                future.set_exception(error)
        self._newcomers.clear()
        for session in self._sessions.values():
            state = self._admission.state(session.name)
            if state is State.WAKING:
                session.sleeper.give_up_waking()
                self._admission.did_not_wake(session.name)
            elif state is State.LEAVING:
                session.sleeper.stay()
                self._admission.stay(session.name, must=False)
            elif state is State.WAITING:
                self._admission.withdraw(session.name)
            self._fail_waiters(session, error)

    def _stay(self, session: _Sleepy) -> None:
        session.sleeper.stay()
        self._admission.stay(session.name, must=False)
        self._let_go_on(session)

    def _withdraw_unwanted(self) -> bool:
        """Take those out of the queue whose callers have all given up."""
        changed = False
        for name in self._admission.owners(State.WAITING):
            session = self._by_name.get(name)
            if session is None or any(waiter.is_wanted() for waiter in session.waiters):
                continue
            self._admission.withdraw(name)
            session.waiters.clear()
            changed = True
        return changed

    def _note_use(self, sequence: Sequence, num_tokens: int) -> None:
        session = self._sessions.get(sequence)
        if session is not None:
            self._admission.used(session.name, num_tokens, self._clock())

    def _end_leaving(self) -> bool:
        changed = False
        for name in self._admission.owners(State.LEAVING):
            session = self._by_name[name]
            if not session.sleeper.is_settled():
                continue
            changed = True
            if session.sleeper.leave():
                self._admission.left(name)
                self._admission.resize(name, session.sleeper.num_blocks)
                self.num_slept += 1
                self._unstored[session] = None
            else:
                self._admission.stay(name, must=True)
            self._ask_again(session)
        return changed

    def _journal_what_is_stored(self) -> None:
        now_s = self._clock()
        if not self._unstored or now_s - self._looked_s < STORED_LOOK_S:
            return
        self._looked_s = now_s
        for session in list(self._unstored):
            if session.is_held:
                continue  # its journal, too, is in other hands
            # Who is awake again looks after it with each step.
            is_asleep = session.sleeper.asleep is not None
            if not is_asleep or not session.sleeper.journal_if_stored():
                del self._unstored[session]

    def _ask_again(self, session: _Sleepy) -> None:
        """What a session was interrupted in goes on when it is its turn again."""
        if not session.waiters:
            return
        if self._admission.state(session.name) is State.ASLEEP:
            self._admission.ask(session.name)
        else:
            self._let_go_on(session)

    def _end_waking(self) -> bool:
        changed = False
        for name in self._admission.owners(State.WAKING):
            session = self._by_name[name]
            if not session.sleeper.is_there():
                continue
            changed = True
            try:
                session.sleeper.wake()
            except BaseException as error:
                # Its blocks are there, as far as they are to be had; its next step says more.
                self._admission.woke(name, self._clock())
                self._fail_waiters(session, error)
                continue
            self._admission.woke(name, self._clock())
            self.num_woken += 1
            self._let_go_on(session)
        return changed

    def _admit(self) -> bool:
        changed = False
        while (name := self._admission.admit()) is not None:
            changed = True
            newcomer = self._newcomers.pop(name, None)
            if newcomer is not None:
                self._admission.woke(name, self._clock())
                newcomer.set_result(None)
                continue
            session = self._by_name[name]
            try:
                session.sleeper.begin_waking()
            except BaseException as error:
                self._admission.did_not_wake(name)
                self._fail_waiters(session, error)
        return changed

    def _make_room(
        self, may_leave: Callable[[Sequence], bool], interrupt: Callable[[Sequence], None]
    ) -> bool:
        admission, changed = self._admission, False
        if not admission.is_short():
            return False
        for name in admission.victims(self._clock(), self._is_busy):
            session = self._by_name.get(name)
            if session is None or session.is_held or not may_leave(session.sequence):
                continue
            changed |= self._begin_leaving(session, interrupt)
            if not admission.is_short():
                return changed
        if not changed and not admission.may_free_more(self._is_held_or_busy):
            self._refuse_head()
        return changed

    def _put_to_sleep(self, may_leave: Callable[[Sequence], bool]) -> bool:
        changed = False
        if self._sleep_after_s is not None:
            for name in self._admission.resting(self._clock(), self._sleep_after_s):
                session = self._by_name.get(name)
                if session is None or session.is_held or self._is_busy(name):
                    continue
                if may_leave(session.sequence):
                    changed |= self._begin_leaving(session, lambda sequence: None)
        return changed

    def _begin_leaving(self, session: _Sleepy, interrupt: Callable[[Sequence], None]) -> bool:
        name = session.name
        self._admission.leave(name)
        if not session.sleeper.begin_leaving():
            self._admission.stay(name, must=True)
            return False
        interrupt(session.sequence)
        return True

    def _is_busy(self, name: Hashable) -> bool:
        session = self._by_name.get(name)
        # Who is being opened has not come yet.
        return session is None or session.sequence in self._busy

    def _is_held_or_busy(self, name: Hashable) -> bool:
        session = self._by_name.get(name)
        return self._is_busy(name) or (session is not None and session.is_held)

    def _refuse_head(self) -> None:
        name = self._admission.head
        assert name is not None
        num_awake = self._admission.num_in(State.AWAKE)
        error = PoolFullError(
            f"session {name!r} finds no room in the gpu pool: {num_awake} of the sessions are "
            "awake and cannot sleep, because the tiers below have no room for what they hold, or "
            "they are in mode 'full'. Use a larger gpu_bytes, or cpu_bytes and ssd_bytes, or close "
            "one of them or take it out of 'full'."
        )
        newcomer = self._newcomers.pop(name, None)
        if newcomer is not None:
            self._admission.withdraw(name)
            self._admission.remove(name)
            newcomer.set_exception(error)
            return
        self._admission.withdraw(name)
        self._fail_waiters(self._by_name[name], error)

    def _let_go_on(self, session: _Sleepy) -> None:
        waiters, session.waiters = session.waiters, []
        for waiter in waiters:
            self.queue_s(self._clock() - waiter.asked_s)
            waiter.then()

    def _fail_waiters(self, session: _Sleepy, error: BaseException) -> None:
        waiters, session.waiters = session.waiters, []
        for waiter in waiters:
            waiter.fail(error)
