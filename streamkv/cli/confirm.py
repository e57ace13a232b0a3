"""Asking before something is deleted."""

import sys

import typer

from streamkv.errors import InputError


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere `yes` must say it.

    Raises:
        InputError: nobody can be asked.
        typer.Abort: the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError("yes", yes, "this deletes, and nobody can be asked", "Add --yes.")
    typer.confirm(question, abort=True, err=True)
