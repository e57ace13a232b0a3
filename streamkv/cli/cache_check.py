"""Reading everything in a store once, to know that it can be read."""

import time
from dataclasses import dataclass
from pathlib import Path

from streamkv.cli.cache_view import has_blocks, open_reader
from streamkv.cli.console import Output
from streamkv.cli.progress import ProgressDisplay
from streamkv.cli.session_view import file_owner, view_sessions
from streamkv.errors import StoreDamagedError, StoreError
from streamkv.tiers.ssd import SsdReader
from streamkv.tiers.store_file import StoreReadError
from streamkv.tiers.store_files import OWNER_FILE
from streamkv.tiers.store_view import VerifyReport


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """Outcome of reading a store.

    Attributes:
        store: its directory.
        num_blocks: records read.
        num_bytes: coded bytes read.
        bad_blocks: fault of each damaged record, by key in hex.
        num_journals: journals read.
        bad_journals: fault of each damaged journal, by session.
        tables: how the store's tables disagree, or why they cannot be read; empty if they agree,
            or a writer is at work.
    """

    store: str
    num_blocks: int
    num_bytes: int
    bad_blocks: dict[str, str]
    num_journals: int
    bad_journals: dict[str, str]
    tables: str

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not (self.bad_blocks or self.bad_journals or self.tables)


def check_store(store: Path, output: Output) -> StoreCheck:
    """Read every record and every journal of a store.

    Raises:
        StoreError: there is no store, it is of another version, or it is being compacted.
    """
    report, tables = VerifyReport(0, 0, 0, ()), ""
    try:
        with open_reader(store) as reader:
            report = _verify(reader, output)
            tables = _disagreement(reader)
    except StoreError as error:
        # What LMDB cannot read has many names there; what is not about damage has one here.
        is_damage = isinstance(error, StoreDamagedError | StoreReadError)
        if not has_blocks(store) or not (is_damage or type(error) is StoreError):
            raise
        tables = str(error)
    views = list(view_sessions(store))
    return StoreCheck(
        store=str(store),
        num_blocks=report.num_records,
        num_bytes=report.num_bytes,
        bad_blocks={key.hex(): fault for key, fault in report.bad},
        num_journals=len(views),
        bad_journals={view.name: view.problem for view in views if view.problem},
        tables=tables,
    )


def _verify(reader: SsdReader, output: Output) -> VerifyReport:
    total, started = max(reader.usage().num_blocks, 1), time.monotonic()
    with ProgressDisplay(output, "verifying") as display:

        def show(num_records: int) -> None:
            rate = num_records / max(time.monotonic() - started, 1e-9)
            amount = f"{num_records:,} blocks, {rate:,.0f} blocks/s"
            display.update(min(num_records / total, 1.0), amount)

        return reader.verify(show)


def _disagreement(reader: SsdReader) -> str:
    """How the tables disagree; while a writer changes them they cannot be compared."""
    if file_owner(reader.path / OWNER_FILE) is not None:
        return ""
    try:
        reader.check_integrity()
    except StoreError as error:
        return str(error)
    return ""
