"""What the demo says when every check held, for people and as JSON."""

import shutil
import sys
from pathlib import Path
from typing import Any

from streamkv.cli.console import Output
from streamkv.cli.demo_checks import NEAR_TIE, Continuation
from streamkv.cli.demo_settings import READER_STORE, DemoSettings
from streamkv.cli.demo_story import Outcome
from streamkv.cli.progress import format_duration


def say_verdict(outcome: Outcome, settings: DemoSettings, output: Output) -> None:
    """The verdict, the figures, and what to try next."""
    whole, read = outcome.whole, outcome.killed.acknowledged
    windows = whole.num_tokens / settings.window_size
    output.line()
    output.line("Every check held.", "bold green")
    output.line(
        f"   Read {whole.text_chars:,} characters; the session holds {whole.num_tokens:,} tokens, "
        f"{windows:.0f} times the window."
    )
    output.line(
        f"   Killed with SIGKILL after {read.token_index:,} tokens; nothing that was acknowledged "
        "is missing, the text is whole."
    )
    output.line(f"   {_compared(outcome.continuation)}")
    output.line(f"   All of it took {format_duration(outcome.seconds)}.")
    output.line()
    output.line("Try next:", "bold")
    program = program_name()
    output.columns(
        [
            (f"   {program} chat", "talk for ever; the chat resumes by its name"),
            (f"   {program} serve", "the same over a WebSocket"),
            (f"   {program} summarize FILE", "a summary of all of a text, SRT or VTT file"),
            (f"   {program} doctor", "what this machine has and how fast it is"),
        ]
    )


def _compared(found: Continuation) -> str:
    ties = f"near ties (top two logits closer than {NEAR_TIE:g}) among them: {found.num_near_ties}"
    if found.first_difference is None:
        return (
            f"The {found.num_tokens} tokens after the resume are those of the undisturbed run; "
            f"{ties}, smallest distance {found.smallest_margin:.2g}."
        )
    return (
        f"The first {found.first_difference} of {found.num_tokens} tokens after the resume are "
        f"those of the undisturbed run; then they part at a near tie, as rounding allows; {ties}."
    )


def program_name() -> str:
    """How this program was called, so that the commands shown can be typed."""
    called = Path(sys.argv[0])
    if called.name != "streamkv":
        return "streamkv"
    return "streamkv" if shutil.which("streamkv") else str(called)


def summary(outcome: Outcome, settings: DemoSettings) -> dict[str, Any]:
    """The same for scripts."""
    killed, resumed, found = outcome.killed, outcome.resumed, outcome.continuation
    return {
        "ok": True,
        "model": settings.model,
        "text": settings.title,
        "window_size": settings.window_size,
        "num_sink_tokens": settings.num_sink_tokens,
        "num_threads": killed.ready.num_threads,
        "text_chars": outcome.whole.text_chars,
        "text_chars_available": settings.text.num_chars,
        "num_tokens": outcome.whole.num_tokens,
        "tokens_per_s": round(killed.pace.tokens_per_s, 1),
        "killed": {
            "acknowledged_tokens": killed.acknowledged.token_index,
            "journaled_tokens": outcome.journal.num_tokens,
            "journaled_chars": outcome.journal.text_chars,
            "torn_bytes": outcome.journal.torn_bytes,
            "tokens_since_copy": outcome.distance,
        },
        "resumed": {
            "engine_s": round(resumed.ready.engine_s, 3),
            "session_s": round(resumed.ready.session_s, 3),
            "stored_tokens": resumed.ready.num_computed,
        },
        "continuation": {
            "num_tokens": found.num_tokens,
            "num_near_ties": found.num_near_ties,
            "first_difference": found.first_difference,
            "smallest_margin": found.smallest_margin,
            "text": "".join(token.text for token in resumed.written),
        },
        "answers": resumed.answers,
        "tiers": {
            name: {"num_blocks": tier.num_blocks, "num_bytes": tier.num_bytes}
            for name, tier in resumed.last.tiers.items()
        },
        "seconds": round(outcome.seconds, 1),
        "store": str(settings.store(READER_STORE)),
    }
