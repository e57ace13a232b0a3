"""`streamkv summarize`: a transcript to its summary."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine, resumable
from streamkv.cli.options import EngineOptions, JsonOption, with_engine
from streamkv.cli.progress import ProgressDisplay
from streamkv.errors import InputError

if TYPE_CHECKING:
    from streamkv.engine import Engine
    from streamkv.summarize import SummaryProgress, SummaryResult


@with_engine
def summarize(
    options: EngineOptions,
    file: Annotated[Path, typer.Argument(help="The transcript: plain text, SRT or VTT.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File or directory.", show_default="beside the transcript"),
    ] = None,
    format: Annotated[
        Literal["markdown", "json"], typer.Option("--format", help="Of the summary.")
    ] = "markdown",
    segment_tokens: Annotated[
        int | None,
        typer.Option("--segment-tokens", help="Most tokens of a part.", show_default="320"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Summarise a transcript of any length; it is read once, and an interrupted run goes on."""
    output = Output(as_json)
    if not file.is_file():
        raise InputError("file", str(file), "no such file", "Check the path.")
    with (
        resumable(output, f"streamkv summarize {file}"),
        open_engine(options, output) as engine,
    ):
        result = _summarize(engine, options, file, out, format, segment_tokens, output)
    _show(result, output)


def _summarize(
    engine: "Engine",
    options: EngineOptions,
    file: Path,
    out: Path | None,
    format: Literal["markdown", "json"],
    segment_tokens: int | None,
    output: Output,
) -> "SummaryResult":
    from streamkv.summarize import summarize_file

    with ProgressDisplay(output, f"summarising {file.name}") as display:

        def show(progress: "SummaryProgress") -> None:
            display.update(
                progress.num_lines / max(progress.total_lines, 1),
                f"{progress.num_segments} parts, {progress.tokens_per_s:,.0f} tokens/s",
            )

        return summarize_file(
            engine,
            file,
            out,
            on_progress=show,
            segment_tokens=segment_tokens,
            format=format,
            state_dir=options.store / "summaries",
        )


def _show(result: "SummaryResult", output: Output) -> None:
    if result.overall.text:
        output.line(result.overall.text)
    output.note(
        f"{result.coverage.num_lines:,} lines in {len(result.segments)} parts, "
        f"{len(result.gaps)} without a summary. Ask about it: streamkv chat {result.session}"
    )
    output.json(
        {
            "file": result.file,
            "session": result.session,
            "num_segments": len(result.segments),
            "num_gaps": len(result.gaps),
            "num_lines": result.coverage.num_lines,
            "num_warnings": result.num_warnings,
            "num_resumed": result.num_resumed,
            "overall": result.overall.text,
        }
    )
