"""`streamkv bench recall`: how often a number hidden in a long text is found.

Answers go to a file one by one, so that an interrupted run goes on with --resume; table, JSON and
picture are made from that file, by a run as by --redraw.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from streamkv.cli.bench_setting import recall_setting, results_directory
from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine, resumable
from streamkv.cli.options import EngineOptions, JsonOption, with_bare_engine
from streamkv.cli.progress import ProgressDisplay
from streamkv.config import EngineConfig, choose_dtype
from streamkv.errors import ConfigError, InputError

if TYPE_CHECKING:
    from streamkv.engine import Engine
    from streamkv.recall_bench.answers import Answer, NotPossible
    from streamkv.recall_bench.run import RecallPlan

DEPTHS = "0.05,0.15,0.25,0.35,0.45,0.55,0.65,0.75,0.85,0.95"


class Files(NamedTuple):
    """Where a run writes."""

    answers: Path
    report: Path
    picture: Path

    @classmethod
    def of(cls, answers: Path) -> "Files":
        """The others lie beside the answers."""
        return cls(answers, answers.with_suffix(".json"), answers.with_suffix(".png"))


@with_bare_engine
def recall(
    options: EngineOptions,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Directory of .md and .txt files to hide numbers in.",
            show_default="Python's language reference; not for figures to publish",
        ),
    ] = None,
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of the streams.")] = (
        "1024,2048,4096,8192"
    ),
    depths: Annotated[
        str, typer.Option("--depths", help="Where the number lies, 0 to 1; taken in turn.")
    ] = DEPTHS,
    questions: Annotated[int, typer.Option("--questions", help="Streams of each length.")] = 20,
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes",
            help="window: sink tokens and window; recall: and some old blocks; full: and all of "
            "them; dense: a window that holds everything.",
            show_default="all that the device has",
        ),
    ] = None,
    recall_blocks: Annotated[
        int, typer.Option("--recall-blocks", help="Old blocks that recall attends to.")
    ] = 16,
    feed_in: Annotated[
        str,
        typer.Option(
            "--feed-in", help="Mode in which streams are read: window, recall, or same as answers."
        ),
    ] = "window",
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks the same questions.")] = 0,
    join: Annotated[
        bool, typer.Option("--join", help="Join files where none is as long as a stream.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Directory for NAME.jsonl, NAME.json and NAME.png.",
            show_default="benchmarks/results if there is one here, else the current directory",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Of these files.")] = "recall",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with NAME.jsonl.")] = False,
    redraw: Annotated[
        Path | None,
        typer.Option("--redraw", help="Ask nothing: table, JSON and picture of a .jsonl of a run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """How often a number hidden in real text is found, by length, depth and mode.

    A stream of exactly so many tokens has one paragraph "The secret number is 43432."; then the
    user asks for it, the answer's start is given, and the next tokens must hold the number. All
    modes are asked the same questions. Lengths, questions and modes may be added with --resume.
    """
    from streamkv.recall_bench.modes import MODES
    from streamkv.recall_bench.run import RecallPlan

    output = Output(as_json)
    if redraw is not None:
        if redraw.suffix != ".jsonl":  # else a file beside it might be itself
            raise InputError("redraw", str(redraw), "no .jsonl", "Give the .jsonl of a run.")
        _finish(Files.of(redraw), output)
        return
    plan = RecallPlan(
        lengths=_numbers("lengths", lengths, int, "1024,4096"),
        questions=questions,
        depths=_numbers("depths", depths, float, "0.1,0.5,0.9"),
        modes=MODES if modes is None else _words(modes),
        recall_blocks=recall_blocks,
        feed_in=feed_in,
    )
    files = Files.of((out or results_directory()) / f"{name}.jsonl")
    _run(options, plan, data, seed, join, files, resume, output)
    _finish(files, output)


def _run(
    options: EngineOptions,
    plan: "RecallPlan",
    data: Path | None,
    seed: int,
    join: bool,
    files: Files,
    resume: bool,
    output: Output,
) -> None:
    """Ask all questions that have no answer yet."""
    from streamkv.device import choose_device
    from streamkv.recall_bench.answers import AnswerFile
    from streamkv.recall_bench.haystack import own_haystack, read_directory
    from streamkv.recall_bench.question import QuestionMaker
    from streamkv.recall_bench.run import ModelFacts, RecallRun

    config = options.config
    dtype = choose_dtype(config.dtype, choose_device(config.device))
    facts = ModelFacts.read(options.model, dtype, output.note)

    def encode(text: str) -> Sequence[int]:
        return facts.tokenizer.encode(text, at_start=False)

    haystack = (
        own_haystack(encode, join=join)
        if data is None
        else read_directory(data.expanduser(), encode, join=join)
    )
    num_prefix = len(facts.tokenizer.prefix_ids)
    maker = QuestionMaker(haystack, encode, num_prefix, seed, plan.depths)
    for length in plan.lengths:
        maker.make(length, 0)  # what cannot be asked is refused before a model is loaded
    setting = recall_setting(options, plan, haystack, seed, dtype)

    def opened(chosen: EngineConfig) -> "AbstractContextManager[Engine]":
        return open_engine(EngineOptions(options.model, chosen), output)

    try:
        with (
            resumable(output, "the same command with --resume"),
            AnswerFile(files.answers, setting, resume=resume) as file,
            ProgressDisplay(output, "asking") as display,
        ):
            RecallRun(plan, config, facts, maker, file, opened, display.update).execute()
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "Give another --out, or free space and go on with --resume."
        raise InputError("out", str(files.answers), reason, remedy) from error


def _finish(files: Files, output: Output) -> None:
    """Table, JSON and picture from the file of answers."""
    from streamkv.recall_bench import heatmap
    from streamkv.recall_bench.answers import read_answers
    from streamkv.recall_bench.report import report

    recorded = read_answers(files.answers)
    made = report(recorded.setting, recorded.answers, recorded.not_possible)
    _show(recorded.answers, recorded.not_possible, output)
    for note in made["notes"]:
        output.line(f"note: {note}")
    text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    try:
        files.report.write_text(text, encoding="utf-8")
        written = [files.answers, files.report]
        if not recorded.answers:
            output.note("No picture was drawn: there are no answers.")
        elif heatmap.has_matplotlib():
            heatmap.draw(files.picture, recorded.setting, recorded.answers, recorded.not_possible)
            written.append(files.picture)
        else:
            output.note(
                f"No picture was drawn: matplotlib is not installed. {heatmap.INSTALL}; then "
                f"streamkv bench recall --redraw {files.answers}"
            )
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("out", str(files.report), reason, "Give another --out.") from error
    output.note("Written: " + ", ".join(map(str, written)))
    output.json(made)


def _show(
    answers: "Sequence[Answer]", not_possible: "Sequence[NotPossible]", output: Output
) -> None:
    from streamkv.recall_bench import report
    from streamkv.recall_bench.modes import MODES

    output.columns(report.row_table(answers, not_possible), report.ROW_HEADER)
    for mode in MODES:
        header, lines = report.depth_table(answers, mode)
        if lines:
            output.line()
            output.columns(lines, header)
    output.line()
    output.columns(report.feed_table(answers), ("length", "read in", "tokens/s"))
    for line in report.agreement_lines(answers):
        output.line(line)


def _words(text: str) -> tuple[str, ...]:
    """The parts of a list, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(field: str, text: str, kind: Callable[[str], Any], example: str) -> tuple[Any, ...]:
    try:
        return tuple(dict.fromkeys(kind(word) for word in _words(text)))
    except ValueError as error:
        remedy = f"Write numbers with commas between them, such as {example}."
        raise ConfigError(field, text, "not a list of numbers", remedy) from error
