"""The command line: `streamkv`, or `python -m streamkv`.

    app          the commands, and what an error looks like and exits with
    options      options that several commands share
    console      where lines, tables and JSON go;  progress  how far something has come
    chat  session  feed  serve  summarize_cmd  cache  bench  doctor  demo

Invariant: importing it, and `--help`, load neither torch nor transformers; a command imports what
it needs when it runs.
"""

import sys


def main() -> None:
    """Run the command line of this process, and exit."""
    from streamkv.cli.app import execute

    sys.exit(execute())
