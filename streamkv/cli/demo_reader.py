"""The process that reads, and that the demo kills: `python -m streamkv.cli.demo_reader JOB`.

It carries out the steps of a job (`demo_job`) with an engine of its own, says each event as a line
of JSON on standard output, and after each `Reading` waits for a line on standard input. It ends
when that input ends, so it never outlives the demo. Ctrl-C is the demo's affair.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from streamkv.cli.demo_job import (
    GO_ON,
    SESSION,
    Ask,
    Event,
    Failed,
    GoOn,
    Job,
    Note,
    Read,
    Reading,
    Ready,
    Step,
    StepDone,
    Tier,
    Wrote,
    decode_job,
    encode_event,
)
from streamkv.cli.exit_codes import exit_code_of
from streamkv.cli.text_file import TextFile
from streamkv.config import EngineConfig
from streamkv.errors import StreamKVError
from streamkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streamkv.engine import Engine
    from streamkv.outputs import Progress
    from streamkv.session import Session

CPU_BYTES = "64MiB"
PIECE_CHARS = 512


class Reader:
    """Carries out one job.

    Args:
        job: what to do.
        out: where events go.
        go_on: where the line comes from that lets it go on.
    """

    def __init__(self, job: Job, out: TextIO, go_on: TextIO) -> None:
        self._job = job
        self._out = out
        self._go_on = go_on
        self._since = time.monotonic()

    def run(self) -> None:
        """Open the session, then one step after the other.

        Raises:
            StreamKVError: the engine refused or failed.
        """
        from streamkv.engine import Engine

        self._since = time.monotonic()
        with Engine(self._job.model, self._config(), on_progress=self._note) as engine:
            opened = time.monotonic()
            with engine.session(SESSION) as session:
                self._say_ready(session, opened - self._since, time.monotonic() - opened)
                for number, step in enumerate(self._job.steps):
                    self._carry_out(step, engine, session)
                    self._say(StepDone(number))

    def _config(self) -> EngineConfig:
        job = self._job
        return EngineConfig(
            window_size=job.window_size,
            num_sink_tokens=job.num_sink_tokens,
            dtype="float32",
            max_sessions=1,
            cpu_bytes=CPU_BYTES,
            store=job.store,
            ssd_bytes=job.ssd_bytes,
            # Compressing fp32 gains a sixth of the room and costs a sixth of the speed.
            codec="raw",
            checkpoint_tokens=512,
            # The demo decodes little; compiling would take a core from reading.
            compile="off",
        )

    def _carry_out(self, step: Step, engine: "Engine", session: "Session") -> None:
        match step:
            case Read(until_chars) if until_chars > session.text_chars:
                for progress in session.feed(self._pieces(session.text_chars, until_chars)):
                    self._report(progress, engine, session)
            case GoOn(num_tokens):
                self._write(session, greedy(num_tokens, ignore_eos=True))
            case Ask(question, max_tokens):
                session.say(question)
                self._write(session, greedy(max_tokens))

    def _pieces(self, start: int, end: int) -> Iterator[str]:
        """The text between two characters, in small pieces: each is journaled by itself."""
        left = end - start
        for piece in TextFile.check(Path(self._job.text)).pieces(start):
            piece = piece[:left]
            left -= len(piece)
            yield from (piece[at : at + PIECE_CHARS] for at in range(0, len(piece), PIECE_CHARS))
            if left == 0:
                return

    def _report(self, progress: "Progress", engine: "Engine", session: "Session") -> None:
        stats = session.stats()
        tiers = {
            name: Tier(used.num_blocks, used.num_bytes, used.limit_bytes)
            for name, used in engine.usage().items()
        }
        self._say(
            Reading(
                progress.num_tokens,
                progress.token_index,
                progress.text_chars,
                stats.num_sink_tokens,
                stats.num_window_tokens,
                tiers,
            )
        )
        if self._go_on.readline() != GO_ON:
            raise SystemExit

    def _write(self, session: "Session", params: SamplingParams) -> None:
        for delta in session.generate(params):
            self._say(Wrote(delta.text, delta.token_id, delta.token_index, delta.margin))

    def _say_ready(self, session: "Session", engine_s: float, session_s: float) -> None:
        import torch

        stats = session.stats()
        self._say(
            Ready(
                torch.get_num_threads(),
                engine_s,
                session_s,
                session.resumed,
                stats.num_tokens,
                stats.num_computed,
                stats.text_chars,
            )
        )

    def _note(self, text: str) -> None:
        self._since = time.monotonic()
        self._say(Note(text))

    def _say(self, event: Event) -> None:
        self._out.write(encode_event(event) + "\n")
        self._out.flush()


def greedy(max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
    """Always the likeliest token."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def main(line: str) -> int:
    """Carry out the job of a line of JSON; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nothing else may write between the events, whatever a library prints.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            Reader(decode_job(line), out, sys.stdin).run()
        except StreamKVError as error:
            code = int(exit_code_of(error))
            out.write(encode_event(Failed(str(error), code)) + "\n")
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
