"""What a demo reads, by what, and where it keeps it. Plain data."""

from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from streamkv.cli.demo_job import SESSION, Job, Step
from streamkv.cli.text_file import TextFile
from streamkv.store import journal_path

COMPARED_TOKENS = 50
"""Greedy tokens after the resume that must be those of the undisturbed run."""

READER_STORE = "reader"
"""Of the process that is killed, and of the one that resumes its session."""

COPY_STORE = "undisturbed"
"""Of the process that goes on from the copy."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of one demo.

    Attributes:
        model: as given to `Engine`.
        title: of the text, for people.
        text: what is read.
        window_size, num_sink_tokens: as in `EngineConfig`.
        ssd_bytes: limit of the file of each of the two stores.
        limit_s: seconds that all of it should take.
        directory: for the stores.
    """

    model: str
    title: str
    text: TextFile
    window_size: int
    num_sink_tokens: int
    ssd_bytes: int
    limit_s: float
    directory: Path

    def line_end(self, start: int, num_chars: int) -> int:
        """Where the first line ends that ends within `num_chars` characters from `start` on.

        The end of that stretch if none does, or of the text if it comes before.
        """
        found = "".join(islice(chain.from_iterable(self.text.pieces(start)), num_chars))
        at = found.find("\n")
        return start + (len(found) if at < 0 else at + 1)

    def store(self, name: str) -> Path:
        """Directory of one of the stores."""
        return self.directory / name

    def journal(self, name: str) -> Path:
        """The session's journal in one of the stores."""
        return journal_path(self.store(name), SESSION)

    def job(self, store: str, *steps: Step) -> Job:
        """Work for a process with one of the stores."""
        return Job(
            model=self.model,
            store=str(self.store(store)),
            text=str(self.text.path),
            window_size=self.window_size,
            num_sink_tokens=self.num_sink_tokens,
            ssd_bytes=self.ssd_bytes,
            steps=steps,
        )
