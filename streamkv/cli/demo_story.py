"""The demo from its first process to its verdict.

    1  a process reads; its session is copied; it reads on and is killed in the middle of a feed
    2  the journal is compared with what was acknowledged, and with the text
    3  a new process resumes the session, goes on by itself for 50 tokens, and reads the rest
    4  it answers questions
    5  another process goes on from the copy, undisturbed: the same text, then the same 50 tokens?

Invariant: when `run` returns, every check was made and held. All that is left behind lies in the
directory that it was given.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from streamkv.cli.console import Output
from streamkv.cli.demo_checks import (
    CheckFailed,
    Continuation,
    JournalCheck,
    check_copy_distance,
    check_journal,
)
from streamkv.cli.demo_child import Child
from streamkv.cli.demo_follow import Follower
from streamkv.cli.demo_job import Ask, GoOn, Read, Reading, Ready, Step, Wrote
from streamkv.cli.demo_kill import FirstAct, Killed
from streamkv.cli.demo_plan import end_within
from streamkv.cli.demo_settings import COMPARED_TOKENS, READER_STORE, DemoSettings
from streamkv.cli.demo_undisturbed import Undisturbed

ANSWER_TOKENS = 48
QUESTIONS = (
    "What is the text above about?",
    "Explain in one sentence what the text above says.",
    "What should a reader remember of it?",
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What the process did that resumed the session.

    Attributes:
        ready: what it began with.
        compared_at: characters of the text before the tokens that are compared.
        written: those tokens.
        last: where its reading ended.
        tokens_per_s: at which it read.
        answers: to the questions.
    """

    ready: Ready
    compared_at: int
    written: list[Wrote]
    last: Reading
    tokens_per_s: float
    answers: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A demo of which every check held."""

    killed: Killed
    journal: JournalCheck
    distance: int
    resumed: Resumed
    whole: JournalCheck
    continuation: Continuation
    seconds: float


class Story:
    """One run of the demo.

    Args:
        settings: what is read, by what, and where.
        output: of the command.
        clock: seconds; a test has its own.
    """

    def __init__(
        self,
        settings: DemoSettings,
        output: Output,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._output = output
        self._clock = clock
        self._began = clock()

    def run(self) -> Outcome:
        """Tell it from beginning to end.

        Raises:
            CheckFailed: something that streamkv promises did not hold.
            ChildError: a process failed.
            StreamKVError: a store or a journal cannot be used.
        """
        settings = self._settings
        killed = FirstAct(settings, self._output, self._began, self._clock).run()
        journal, distance = self._check_killed(killed)
        resumed = self._resume(killed, journal)
        whole = check_journal(settings.journal(READER_STORE), settings.text, resumed.last)
        undisturbed = Undisturbed(settings, self._output, self._clock)
        continuation = undisturbed.compare(resumed.written, resumed.compared_at)
        seconds = self._clock() - self._began
        return Outcome(killed, journal, distance, resumed, whole, continuation, seconds)

    def _check_killed(self, killed: Killed) -> tuple[JournalCheck, int]:
        read = killed.acknowledged
        self._say(f"   At {read.token_index:,} tokens: SIGKILL, in the middle of a feed.")
        self._heading("2. Is its journal intact?")
        path = self._settings.journal(READER_STORE)
        journal = check_journal(path, self._settings.text, read)
        distance = check_copy_distance(killed.copied, journal)
        self._say(
            f"   Yes: it has {journal.num_tokens:,} tokens and {journal.text_chars:,} characters: "
            f"all {read.token_index:,} tokens that were acknowledged, and exactly the beginning of "
            "the text."
        )
        if journal.torn_bytes:
            self._say(
                f"   {journal.torn_bytes} bytes of a record cut off by the kill do not count."
            )
        self._say(
            f"   (A copy of the session was taken {distance:,} tokens before the kill, for step 5.)"
        )
        return journal, distance

    def _resume(self, killed: Killed, journal: JournalCheck) -> Resumed:
        settings = self._settings
        num_chars = settings.text.num_chars
        # Near the kill, where wrong KV from the ssd tier, or a wrong seam, would show most.
        size = settings.window_size
        check_end = settings.line_end(min(journal.text_chars + size, num_chars), size)
        elapsed_s = self._clock() - self._began
        pace = killed.pace.later(elapsed_s, journal.num_tokens, journal.text_chars)
        in_time = end_within(pace, num_chars, size, settings.limit_s)
        end = max(check_end, settings.line_end(in_time, size))
        asks = [Ask(question, ANSWER_TOKENS) for question in QUESTIONS]
        steps: list[Step] = [Read(check_end), GoOn(COMPARED_TOKENS), Read(end), *asks]
        with Child(settings.job(READER_STORE, *steps)) as child:
            self._heading(f"3. A new process (id {child.process_id}) resumes the session.")
            follower = Follower(child.events(), self._output, self._clock)
            ready = follower.ready()
            self._check_resumed(ready, journal, killed.copied.num_stored)
            first, _ = follower.read("reading on", end)
            written = self._write_on(follower)
            last, rate = follower.read("reading the rest", end)
            self._say_end(end)
            answers = self._ask(follower)
        if first is None:
            raise CheckFailed("the text ended at the kill, so nothing could be read on")
        return Resumed(ready, check_end, written, last or first, rate, answers)

    def _check_resumed(self, ready: Ready, journal: JournalCheck, num_stored: int) -> None:
        if (ready.num_tokens, ready.text_chars) != (journal.num_tokens, journal.text_chars):
            raise CheckFailed(
                f"the session resumed at {ready.num_tokens:,} tokens and {ready.text_chars:,} "
                f"characters, its journal says {journal.num_tokens:,} and {journal.text_chars:,}"
            )
        if ready.num_computed < num_stored:
            raise CheckFailed(
                f"the window came back as of token {ready.num_computed:,}, although the journal "
                f"has a checkpoint at token {num_stored:,} or later"
            )
        self._say(
            f"   Model loaded in {ready.engine_s:.1f} s, session resumed in {ready.session_s:.2f} "
            f"s: its window came back from the ssd tier as it was at token "
            f"{ready.num_computed:,}; the {ready.num_tokens - ready.num_computed:,} tokens after "
            f"it come from the journal. The text goes on at character {ready.text_chars:,}."
        )

    def _write_on(self, follower: Follower) -> list[Wrote]:
        self._say(f"   It goes on by itself for {COMPARED_TOKENS} tokens (greedy, fp32):")
        return follower.quote()

    def _say_end(self, end: int) -> None:
        num_chars = self._settings.text.num_chars
        if end < num_chars:
            self._say(
                f"   It stops at {end:,} of {num_chars:,} characters, to keep this demo within "
                f"{self._settings.limit_s:.0f} s on this machine (--seconds)."
            )

    def _ask(self, follower: Follower) -> list[str]:
        self._heading("4. Questions, in the same session (a very small model answers).")
        answers = []
        for question in QUESTIONS:
            self._say(f"   {question}")
            answers.append("".join(token.text for token in follower.quote()))
        return answers

    def _heading(self, text: str) -> None:
        self._output.line()
        self._output.line(text, "bold")

    def _say(self, text: str) -> None:
        self._output.line(text)
