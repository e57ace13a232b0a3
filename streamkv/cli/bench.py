"""`streamkv bench`: how well and how fast this machine runs a model, by the engine itself.

No store takes part, so no session is resumed; only `recall` writes anything, its results.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamkv.cli.bench_recall import recall
from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine
from streamkv.cli.options import EngineOptions, JsonOption, with_bare_engine
from streamkv.cli.progress import ProgressDisplay
from streamkv.cli.text_file import TextFile
from streamkv.config import require_int
from streamkv.errors import InputError
from streamkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streamkv.engine import Engine
    from streamkv.outputs import Score
    from streamkv.session import Session

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Outcome of `bench ppl`.

    Attributes:
        mean_nll: nats per prediction.
        perplexity: its exponential.
        num_predictions: predictions that count.
        first_index, last_index: token indices at which they were made.
        tokens_per_s: rate of these.
    """

    mean_nll: float
    perplexity: float
    num_predictions: int
    first_index: int
    last_index: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Outcome of `bench decode`: times of single steps with `context` tokens before them."""

    tokens_per_s: float
    median_ms: float
    p90_ms: float
    max_ms: float
    num_tokens: int
    context: int


def make_app() -> typer.Typer:
    """The commands of `streamkv bench`."""
    app = typer.Typer(help="Measure perplexity, speed and recall.", rich_markup_mode=None)
    app.command()(ppl)
    app.command()(decode)
    app.command()(recall)
    return app


@with_bare_engine
def ppl(
    options: EngineOptions,
    file: Annotated[Path, typer.Argument(help="A text file, UTF-8.")],
    tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the text.")] = 16_385,
    first: Annotated[
        int, typer.Option("--from", help="Token index of the first prediction that counts.")
    ] = 4_096,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of the first tokens of a text, each predicted from sinks and window.

    A prediction at token index i is that of token i + 1 from the tokens up to i.
    """
    output = Output(as_json)
    require_int("from", first, 0)
    require_int("tokens", tokens, first + 2)
    text = TextFile.check(file)
    with open_engine(options, output) as engine, engine.session("bench") as session:
        result = measure_perplexity(session, text, tokens, first, output)
        setting = _setting(engine)
    config = options.config
    output.line(
        f"{result.mean_nll:.4f} nats, perplexity {result.perplexity:.2f}, "
        f"{result.tokens_per_s:,.0f} tokens/s ({result.num_predictions:,} predictions at token "
        f"indices {result.first_index:,} to {result.last_index:,}; {config.num_sink_tokens} sink "
        f"tokens, window {config.window_size:,})"
    )
    output.json({"file": str(file), **setting, **asdict(result)})


@with_bare_engine
def decode(
    options: EngineOptions,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to generate.")] = 128,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens before them.", show_default="a full window"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of one session with a full window, one step at a time."""
    output = Output(as_json)
    config = options.config
    if context is None:
        context = config.window_size + config.num_sink_tokens
    require_int("tokens", tokens, 1)
    require_int("context", context, 1)
    with open_engine(options, output) as engine, engine.session("bench") as session:
        result = measure_decode(engine, session, tokens, context, output)
        setting = _setting(engine)
    output.line(
        f"{result.tokens_per_s:.1f} tokens/s: median {result.median_ms:.2f} ms, 90 % under "
        f"{result.p90_ms:.2f}, worst {result.max_ms:.2f} ({result.num_tokens} tokens after "
        f"{result.context:,}, window {config.window_size:,})"
    )
    output.json({**setting, **asdict(result)})


def measure_perplexity(
    session: "Session", text: TextFile, num_tokens: int, first_index: int, output: Output
) -> PerplexityResult:
    """Mean negative log-likelihood of tokens `first_index + 1` to `num_tokens - 1` of a text.

    Raises:
        InputError: the text is shorter.
    """
    total, count = 0.0, 0
    begun = started = time.perf_counter()
    num_before = session.num_tokens
    with ProgressDisplay(output, f"scoring {text.path.name}") as display:
        for score in _first_scores(session, text, num_before + num_tokens):
            index = score.token_index - num_before
            if index <= first_index or score.logprob is None:
                started = time.perf_counter()
            else:
                total -= score.logprob
                count += 1
            rate = index / max(time.perf_counter() - begun, 1e-9)
            display.update(index / num_tokens, f"{index:,} tokens, {rate:,.0f} tokens/s")
    seconds = max(time.perf_counter() - started, 1e-9)
    if count < num_tokens - 1 - first_index:
        raise InputError(
            "file",
            str(text.path),
            f"it has {session.num_tokens - num_before:,} tokens, not {num_tokens:,}",
            "Use a longer text or a smaller --tokens.",
        )
    mean = total / count
    return PerplexityResult(
        mean_nll=mean,
        perplexity=math.exp(mean),
        num_predictions=count,
        first_index=first_index,
        last_index=num_tokens - 2,
        tokens_per_s=count / seconds,
    )


def measure_decode(
    engine: "Engine", session: "Session", num_tokens: int, context: int, output: Output
) -> DecodeResult:
    """Time single steps after `context` arbitrary tokens; a few more come first, to warm up."""
    with ProgressDisplay(output, "filling the window") as display:
        for progress in session.feed(_arbitrary_ids(engine.model.vocab_size, context)):
            done = f"{progress.num_tokens:,} tokens, {progress.tokens_per_s:,.0f} tokens/s"
            display.update(progress.num_tokens / context, done)
    wanted = num_tokens + WARM_UP_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
    times_ms: list[float] = []
    with ProgressDisplay(output, "decoding") as display:
        before = time.perf_counter()
        for _ in session.generate(params):
            now = time.perf_counter()
            times_ms.append(1000 * (now - before))
            rate = len(times_ms) / max(sum(times_ms) / 1000, 1e-9)
            display.update(len(times_ms) / wanted, f"{len(times_ms)} tokens, {rate:.1f} tokens/s")
            before = time.perf_counter()
    measured = sorted(times_ms[WARM_UP_TOKENS:wanted])
    median = statistics.median(measured)
    return DecodeResult(
        tokens_per_s=1000 / median,
        median_ms=median,
        p90_ms=measured[int(0.9 * (len(measured) - 1))],
        max_ms=measured[-1],
        num_tokens=len(measured),
        context=context,
    )


def _first_scores(session: "Session", text: TextFile, end: int) -> "Iterator[Score]":
    scores = session.score(text.pieces())
    try:
        yield from itertools.takewhile(lambda score: score.token_index < end, scores)
    finally:
        scores.close()


def _arbitrary_ids(vocab_size: int, num_tokens: int) -> Iterator[list[int]]:
    """Ids spread over the vocabulary, the same always: what they say does not change the time."""
    for start in range(0, num_tokens, 512):
        yield [7919 * n % vocab_size for n in range(start, min(start + 512, num_tokens))]


def _setting(engine: "Engine") -> dict[str, object]:
    config = engine.config
    return {
        "model": engine.model_name,
        "dtype": engine.model.spec.dtype,
        "window_size": config.window_size,
        "num_sink_tokens": config.num_sink_tokens,
        "prefill_chunk": config.prefill_chunk,
        "num_threads": config.num_threads,
    }
