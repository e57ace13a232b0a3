"""The last act: another process goes on from the copy, and nobody disturbs it.

Invariant: both sides read the same tokens, as their journals say, before they are compared.
"""

import time
from collections.abc import Callable, Sequence

from streamkv.cli.console import Output
from streamkv.cli.demo_checks import Continuation, check_same_stream, compare
from streamkv.cli.demo_child import Child
from streamkv.cli.demo_follow import Follower
from streamkv.cli.demo_job import GoOn, Read, Wrote
from streamkv.cli.demo_settings import COMPARED_TOKENS, COPY_STORE, READER_STORE, DemoSettings


class Undisturbed:
    """The run that everything is compared with.

    Args:
        settings: of the demo; the copy lies in its store.
        output: of the command.
        clock: seconds.
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

    def compare(self, resumed: Sequence[Wrote], until_chars: int) -> Continuation:
        """Read up to a character, go on greedily, and compare with what `resumed` says.

        Args:
            resumed: what the resumed session generated there.
            until_chars: characters of the text before it.

        Raises:
            CheckFailed: another stream, or other tokens.
            ChildError: the process failed.
        """
        calm = self._run(until_chars)
        if resumed:
            paths = self._settings.journal(READER_STORE), self._settings.journal(COPY_STORE)
            check_same_stream(*paths, num_tokens=resumed[0].token_index)
        return compare(resumed, calm, COMPARED_TOKENS)

    def _run(self, until_chars: int) -> list[Wrote]:
        job = self._settings.job(COPY_STORE, Read(until_chars), GoOn(COMPARED_TOKENS))
        with Child(job) as child:
            self._output.line()
            self._output.line(
                f"5. Another process (id {child.process_id}) goes on from the copy, undisturbed. "
                "It reads the same text; does it write the same?",
                "bold",
            )
            follower = Follower(child.events(), self._output, self._clock)
            follower.ready()
            follower.read("reading", until_chars)
            return follower.quote()
