"""Names of sessions. A valid name is also a safe file name on every file system."""

import re

from streamkv.errors import InputError

MAX_NAME_CHARS = 100

JOURNAL_SUFFIX = ".journal"
DIGESTS_SUFFIX = ".digests"

# ASCII only: file systems disagree about which other characters are the same, and count bytes.
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_. -]{{0,{MAX_NAME_CHARS - 1}}}", re.ASCII)


def validate_session_name(name: str) -> str:
    """Return `name` if a session may be called so.

    Raises:
        InputError: not 1 to 100 of the letters a-z and A-Z, digits, '-', '_', '.' and ' ', or a
            text that starts with '.' or ' ' or ends with ' '.
    """
    remedy = (
        f"Use 1 to {MAX_NAME_CHARS} letters (a-z, A-Z), digits, '-', '_', '.' or ' ', "
        "starting with none of '.' and ' ', not ending with ' '."
    )
    if not isinstance(name, str):
        raise InputError("name", name, "not a text", remedy)
    if _NAME.fullmatch(name) is None or name.endswith(" "):
        raise InputError("name", name, "not a valid session name", remedy)
    return name
