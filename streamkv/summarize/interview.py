"""The questions of one run and what is made of the answers: points, gaps, the overall summary.

Each segment is said to the session that reads the transcript, and while it is in the window the
model is asked about it. An answer that is none is asked for again, apart, about each half of the
segment; a half that fails again becomes a `Gap` that says so. Invariant: the points and gaps that
are made of a segment cover all of it. This module knows neither files nor the order of a run.
"""

from collections.abc import Sequence

from streamkv.summarize.answers import Answer, check_answer
from streamkv.summarize.asking import EngineLike, Question, RawAnswer, SessionLike, ask, ask_apart
from streamkv.summarize.plan import Plan
from streamkv.summarize.prompts import (
    OPENING,
    group_prompt,
    overall_prompt,
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
        self._apart_name = f"{session_name}-apart"
        self._plan = plan
        self.num_tokens = 0

    def summarize(
        self, session: SessionLike | None, segment: Segment, previous: Sequence[str]
    ) -> SegmentSummary:
        """Points and gaps for a segment.

        Args:
            session: reads the segment; `None` if it has done so and only the answer was lost.
            segment: what is asked about.
            previous: points of the segment before; the same again are no answer.
        """
        points, gaps = list[Point](), list[Gap]()
        answer = self._ask(session, segment, previous) if session is not None else None
        if answer is not None and answer.problem is None:
            points += [Point(text, place_of(segment)) for text in answer.points]
        else:
            for half in halve(segment):
                self._ask_about_half(half, previous, points, gaps)
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

    def _ask(self, session: SessionLike, segment: Segment, previous: Sequence[str]) -> Answer:
        before = session.stats().num_tokens
        raw = ask(session, self._about(segment, retry=False))
        self.num_tokens += session.stats().num_tokens - before
        return _checked(raw, segment.text, previous)

    def _ask_about_half(
        self, half: Segment, previous: Sequence[str], points: list[Point], gaps: list[Gap]
    ) -> None:
        raw = self._ask_apart(self._about(half, retry=True))
        answer = _checked(raw, half.text, previous)
        if answer.problem is None:
            points += [Point(text, place_of(half)) for text in answer.points]
        else:
            gaps.append(Gap(place_of(half), answer.problem.value, half.text[:MAX_BEGINS_CHARS]))

    def _about(self, segment: Segment, *, retry: bool) -> Question:
        prompt = segment_prompt(segment.index + 1, segment.text)
        return Question(prompt, OPENING, self._plan.answer, retry)

    def _ask_about_group(self, notes: str, retry: bool) -> tuple[str, ...] | None:
        question = Question(group_prompt(notes), OPENING, self._plan.answer, retry)
        answer = _checked(self._ask_apart(question))
        return answer.points if answer.problem is None else None

    def _ask_about_all(self, notes: str) -> Answer:
        prompt = overall_prompt(notes)
        answer = _checked(self._ask_apart(Question(prompt, "", self._plan.answer)))
        if answer.problem is None:
            return answer
        return _checked(self._ask_apart(Question(prompt, "", self._plan.answer, retry=True)))

    def _ask_apart(self, question: Question) -> RawAnswer:
        raw = ask_apart(self._engine, self._apart_name, question)
        self.num_tokens += self._engine.count_tokens(question.prompt + raw.text)
        return raw


def _checked(raw: RawAnswer, source: str = "", previous: Sequence[str] = ()) -> Answer:
    # Notes may be taken over word for word from notes, so that these have no source.
    again = (*tasks(), *previous)
    return check_answer(raw.text, ended=raw.ended, source=source, not_again=again)
