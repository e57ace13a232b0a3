"""Summaries of transcripts: readers, segments and the way from one to the other.

file -> source (lines) -> srt | vtt | text (cues) -> segments -> interview (points) -> writer
"""

from streamkv.summarize.result import SummaryResult
from streamkv.summarize.summary import SummaryProgress, summarize_file
from streamkv.summarize.writer import SummaryFormat

__all__ = ["SummaryFormat", "SummaryProgress", "SummaryResult", "summarize_file"]
