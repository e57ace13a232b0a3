"""Questions about a transcript, and what is made of the answers: points, gaps, the overall text.

An answer that is none is asked for again about each half of the segment; a half that fails again
becomes a `Gap` that says so. Invariant: the points and gaps made of a segment cover all of it. This
module knows neither files nor the order of a run.
"""

from collections.abc import Sequence

from streamkv.summarize.answers import MAX_POINTS, Answer, check_answer
from streamkv.summarize.asking import EngineLike, Question, ask
from streamkv.summarize.plan import Plan
from streamkv.summarize.prompts import (
    NOTES_LEAD,
    NOTES_OPENING,
    OPENING,
    notes_prompt,
    segment_prompt,
    tasks,
)
from streamkv.summarize.reduction import reduce_notes
from streamkv.summarize.result import Gap, Overall, Point, SegmentSummary, place_of
from streamkv.summarize.segments import Coverage, Segment, halve

MAX_BEGINS_CHARS = 160
NOTHING_USABLE = "No overall summary: no part has a usable one"


class Interview:
    """Asks an engine about a transcript; `num_tokens` counts what it read and wrote for that."""

    def __init__(self, engine: EngineLike, session_name: str, plan: Plan) -> None:
        self._engine = engine
        self._session_name = session_name
        self._plan = plan
        self.num_tokens = 0

    def summarize(self, segment: Segment) -> SegmentSummary:
        """Points and gaps for a segment."""
        answer = self._ask_about(segment, retry=False)
        parts = [(segment, answer)]
        if answer.problem is not None:
            parts = [(half, self._ask_about(half, retry=True)) for half in halve(segment)]
        points, gaps = list[Point](), list[Gap]()
        for part, part_answer in parts:
            points += [Point(text, place_of(part)) for text in part_answer.points]
            if part_answer.problem is not None:
                begins = part.text[:MAX_BEGINS_CHARS]
                gaps.append(Gap(place_of(part), part_answer.problem.value, begins))
        coverage = Coverage(segment.num_lines, segment.num_chars)
        return SegmentSummary(
            segment.index, place_of(segment), coverage, tuple(points), tuple(gaps)
        )

    def summarize_all(self, segments: Sequence[SegmentSummary]) -> Overall:
        """The overall summary, from the points of all segments."""
        notes = ["\n".join(f"- {point.text}" for point in segment.points) for segment in segments]
        usable = [note for note in notes if note]
        if not usable:
            return Overall("", NOTHING_USABLE)
        reduced = reduce_notes(
            usable, self._ask_about_group, self._engine.count_tokens, self._plan.limits
        )
        answer = self._ask_about_all(reduced.notes)
        problems = []
        if answer.problem is not None:
            problems.append(f"No overall summary: {answer.problem.value}")
        if num_gaps := sum(len(segment.gaps) for segment in segments):
            problems.append(f"Places without a summary of their own: {num_gaps}")
        if reduced.num_unshortened:
            problems.append(f"Groups of notes that were cut short: {reduced.num_unshortened}")
        return Overall(" ".join(answer.points), "; ".join(problems))

    def _ask_about(self, segment: Segment, *, retry: bool) -> Answer:
        prompt = segment_prompt(segment.text)
        return self._ask(
            Question(prompt, OPENING, self._plan.answer, MAX_POINTS, retry), segment.text
        )

    def _ask_about_group(self, notes: str, retry: bool) -> tuple[str, ...] | None:
        answer = self._ask(self._about_notes(notes, retry=retry))
        if answer.problem is not None:
            return None
        return tuple(point.removeprefix(NOTES_LEAD) for point in answer.points)

    def _ask_about_all(self, notes: str) -> Answer:
        answer = self._ask(self._about_notes(notes, retry=False))
        if answer.problem is None:
            return answer
        return self._ask(self._about_notes(notes, retry=True))

    def _about_notes(self, notes: str, *, retry: bool) -> Question:
        return Question(notes_prompt(notes), NOTES_OPENING, self._plan.answer, MAX_POINTS, retry)

    def _ask(self, question: Question, source: str = "") -> Answer:
        """Ask and check; without a `source`: notes on notes may be taken over word for word."""
        raw = ask(self._engine, self._session_name, question)
        self.num_tokens += self._engine.count_tokens(question.prompt + raw.text)
        return check_answer(
            raw.text,
            ended=raw.ended,
            source=source,
            opening=question.opening,
            not_again=tasks(),
        )
