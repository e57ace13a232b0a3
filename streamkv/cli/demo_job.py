"""What the demo asks of a process that it starts, and what that process says: JSON both ways.

    job     steps to carry out with one session: read on, go on by itself, answer
    event   one line each; after `Reading` the process waits for a line that lets it go on

Invariant: `decode_event(encode_event(event)) == event`, likewise for jobs. No engine, no processes.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

SESSION = "demo"
"""The session that all processes open."""

GO_ON = "\n"
"""What lets a reading process go on; the end of its input tells it to end."""


@dataclass(frozen=True, slots=True)
class Read:
    """Feed the text up to a character, from wherever the session stands."""

    until_chars: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """Generate so many tokens greedily."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Say something by the chat template and generate the answer."""

    question: str
    max_tokens: int


Step = Read | GoOn | Ask


@dataclass(frozen=True, slots=True)
class Job:
    """Work for one process.

    Attributes:
        model: as given to `Engine`.
        store: directory.
        text: file that is read.
        window_size, num_sink_tokens: as in `EngineConfig`.
        ssd_bytes: limit of the store's file.
        steps: in order.
    """

    model: str
    store: str
    text: str
    window_size: int
    num_sink_tokens: int
    ssd_bytes: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that takes long has begun or ended."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The session is open.

    Attributes:
        num_threads: threads that compute.
        engine_s: seconds that opening the engine took, without imports and what was noted.
        session_s: seconds that opening the session took.
        resumed: the session existed before.
        num_tokens: tokens in its stream.
        num_computed: of these, tokens whose KV is there.
        text_chars: characters of text that it has accepted.
    """

    num_threads: int
    engine_s: float
    session_s: float
    resumed: bool
    num_tokens: int
    num_computed: int
    text_chars: int


@dataclass(frozen=True, slots=True)
class Tier:
    """Blocks and bytes in a tier, and its limit."""

    num_blocks: int
    num_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a `Read` has come: what is said here is acknowledged.

    Attributes:
        num_tokens: tokens of this `Read` computed so far.
        token_index: tokens of the stream that are computed.
        text_chars: characters of text that the session has accepted.
        num_sink_tokens, num_window_tokens: attended now.
        tiers: by name.
    """

    num_tokens: int
    token_index: int
    text_chars: int
    num_sink_tokens: int
    num_window_tokens: int
    tiers: dict[str, Tier]


@dataclass(frozen=True, slots=True)
class Wrote:
    """A token of a `GoOn` or an `Ask`; see `Delta`."""

    text: str
    token_id: int | None
    token_index: int
    margin: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """The step of this number was carried out."""

    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The process ends because of an error that streamkv raised on purpose."""

    message: str
    exit_code: int


Event = Note | Ready | Reading | Wrote | StepDone | Failed

_STEPS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Read, GoOn, Ask)}
_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Note, Ready, Reading, Wrote, StepDone, Failed)
}


def encode_job(job: Job) -> str:
    """One line of JSON."""
    steps = [{"kind": type(step).__name__} | dataclasses.asdict(step) for step in job.steps]
    return json.dumps(dataclasses.asdict(job) | {"steps": steps})


def decode_job(line: str) -> Job:
    """The inverse of `encode_job`."""
    fields = json.loads(line)
    steps = tuple(_STEPS[step.pop("kind")](**step) for step in fields.pop("steps"))
    return Job(**fields, steps=steps)


def encode_event(event: Event) -> str:
    """One line of JSON, without its end."""
    return json.dumps({"kind": type(event).__name__} | dataclasses.asdict(event))


def decode_event(line: str) -> Event:
    """The inverse of `encode_event`.

    Raises:
        ValueError: not the line of an event.
    """
    try:
        fields = json.loads(line)
        kind = _EVENTS[fields.pop("kind")]
        if kind is Reading:
            fields["tiers"] = {name: Tier(**tier) for name, tier in fields["tiers"].items()}
        event: Event = kind(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {line!r}") from error
    return event
