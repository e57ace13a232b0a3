"""Summaries of transcripts: readers, segments and the way from one to the other."""
