"""A process that imports a session and is killed half way. Not a test: `test_exchange` runs it.

import_child.py MODEL STORE FILE FAULT_POINT|journal.link
"""

import os
import signal
import sys

from streamkv import Engine, EngineConfig
from streamkv.tiers.faults import inject


def kill_myself(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(model: str, store: str, file: str, point: str) -> None:
    """Import until killed."""
    left = [2]

    def kill_later() -> None:
        left[0] -= 1
        if left[0] == 0:
            kill_myself()

    config = EngineConfig(window_size=128, ssd_bytes="64MiB", store=store, compile="off")
    engine = Engine(model, config)
    if point == "journal.link":
        os.link = kill_myself
        engine.import_session(file)
    elif point == "ssd.fsync":
        with inject(point, kill_myself):
            engine.import_session(file)
    else:
        with inject(point, kill_later):
            engine.import_session(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
