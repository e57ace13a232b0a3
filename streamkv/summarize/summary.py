"""A transcript file to its summary: what happens in which order, and how a run goes on.

The transcript is read once, by an endless session named after the content, which can be asked about
it later; and each segment, once it is read, is summarised. Invariant: no character is fed to that
session twice, no segment is summarised twice, and the segments of the result cover every line of
the file; the sum is checked. A run that was interrupted goes on from its ledger and from what its
session has read, and ends as if it had not been. Another content is another run.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamkv.summarize.asking import EngineLike, read_on
from streamkv.summarize.cues import ReadWarnings
from streamkv.summarize.interview import Interview
from streamkv.summarize.ledger import Ledger
from streamkv.summarize.plan import Plan, make_plan
from streamkv.summarize.prompts import PROMPT_VERSION, SYSTEM
from streamkv.summarize.readers import Transcript, open_transcript
from streamkv.summarize.result import SummaryResult
from streamkv.summarize.segments import Coverage, coverage_of_cues, cut_segments
from streamkv.summarize.writer import SummaryFormat, output_path, write_summary


@dataclass(frozen=True, slots=True)
class SummaryProgress:
    """How far a summary has come.

    Attributes:
        num_lines: lines of the transcript that are summarised.
        total_lines: lines of the transcript.
        num_segments: segments that are summarised.
        num_tokens: tokens that the model has read and written in this run.
        tokens_per_s: rate of this run.
    """

    num_lines: int
    total_lines: int
    num_segments: int
    num_tokens: int
    tokens_per_s: float


OnProgress = Callable[[SummaryProgress], None]


def summarize_file(
    engine: EngineLike,
    path: Path,
    out: Path | None = None,
    *,
    on_progress: OnProgress | None = None,
    segment_tokens: int | None = None,
    format: SummaryFormat = "markdown",
    state_dir: Path | None = None,
) -> SummaryResult:
    """Summarise a transcript (plain text, SRT, VTT) and write the summary.

    Args:
        engine: the engine that reads it.
        path: the transcript.
        out: file or directory of the summary; `None`: beside the transcript.
        on_progress: called after each segment.
        segment_tokens: most tokens of a segment; `None`: 320, or what the window has room for.
        format: of the summary.
        state_dir: directory of ledgers, from which an interrupted run goes on; `None`: a run that
            is interrupted begins anew.

    Raises:
        InputError: the transcript cannot be read or holds no text, or `out` cannot be written.
        ConfigError: the window has no room for a segment, the question and the answer.
        StoreError: the ledger cannot be read or written.
    """
    transcript = open_transcript(path)
    target = output_path(path, out, format)
    plan = make_plan(engine.count_tokens, engine.config.window_size, segment_tokens)
    key = _run_key(transcript, engine.model_name, plan)
    ledger = Ledger.open(state_dir / f"{key}.jsonl" if state_dir else None)
    result = _Run(engine, transcript, plan, key, ledger, on_progress).result()
    write_summary(result, target, format)
    return result


def _run_key(transcript: Transcript, model_name: str, plan: Plan) -> str:
    """Names a run by all that its result depends on: content, model, sizes, prompts."""
    parts = (transcript.info.digest, model_name, plan.segment, plan.answer, PROMPT_VERSION)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Run:
    """One summary in the making."""

    def __init__(
        self,
        engine: EngineLike,
        transcript: Transcript,
        plan: Plan,
        key: str,
        ledger: Ledger,
        on_progress: OnProgress | None,
    ) -> None:
        self._engine = engine
        self._transcript = transcript
        self._plan = plan
        self._key = key
        self._session_name = f"summary-{key}"
        self._ledger = ledger
        self._interview = Interview(engine, f"{self._session_name}-question", plan)
        self._num_read = 0
        self._on_progress = on_progress
        self._started_s = time.monotonic()

    def result(self) -> SummaryResult:
        """Do what is not done yet; nothing at all if the ledger is complete."""
        num_resumed = len(self._ledger.summaries)
        warnings = ReadWarnings(str(self._transcript.path))
        total = coverage_of_cues(self._transcript.cues(warnings))
        if self._ledger.overall is None:
            self._summarize_segments(total)
        segments = tuple(self._ledger.summaries[i] for i in sorted(self._ledger.summaries))
        covered = sum((segment.coverage for segment in segments), Coverage())
        assert covered == total, f"{covered} of {total} covered"
        overall = self._ledger.overall
        if overall is None:
            overall = self._interview.summarize_all(segments)
            self._ledger.finish(overall)
        return SummaryResult(
            file=str(self._transcript.path),
            key=self._key,
            session=self._session_name,
            model=self._engine.model_name,
            format=self._transcript.format.value,
            encoding=self._transcript.info.encoding,
            overall=overall,
            segments=segments,
            coverage=total,
            warnings=tuple(warnings.kept),
            num_warnings=warnings.num_total,
            num_resumed=num_resumed,
        )

    def _summarize_segments(self, total: Coverage) -> None:
        cues = self._transcript.cues(ReadWarnings(str(self._transcript.path)))
        covered, num_chars = Coverage(), 0
        with self._engine.session(self._session_name, system=SYSTEM) as session:
            for segment in cut_segments(cues, self._engine.count_tokens, self._plan.segment):
                text = segment.text + "\n"
                self._num_read += read_on(session, text, num_chars)
                num_chars += len(text)
                if segment.index not in self._ledger.summaries:
                    self._ledger.finish_segment(self._interview.summarize(segment))
                covered += Coverage(segment.num_lines, segment.num_chars)
                self._report(covered, total, segment.index + 1)

    def _report(self, covered: Coverage, total: Coverage, num_segments: int) -> None:
        if self._on_progress is None:
            return
        num_tokens = self._num_read + self._interview.num_tokens
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        self._on_progress(
            SummaryProgress(
                num_lines=covered.num_lines,
                total_lines=total.num_lines,
                num_segments=num_segments,
                num_tokens=num_tokens,
                tokens_per_s=num_tokens / elapsed_s,
            )
        )
