"""The fields of a client's message, taken one by one and checked.

Whatever JSON came, each field is checked for presence, type, size and valid Unicode before it is
used, and a field that nobody takes is refused. It does not know which message has which fields.
"""

from typing import Any

from streamkv.errors import InputError
from streamkv.ws_server.messages import VERSION, ErrorCode, Feed, RequestId

MAX_NAME_CHARS = 100
MAX_ID_CHARS = 64
MAX_TOKEN_ID = 2**31 - 1
MAX_PARAMS = 32
MAX_PARAM_ITEMS = 64
MAX_PARAM_CHARS = 1024


_REQUIRED: Any = object()


class MessageError(InputError):
    """A client message that cannot be accepted.

    Attributes:
        code: its stable name.
        request_id: id of the message, if that much could be read.
    """

    def __init__(
        self,
        code: ErrorCode,
        field: str,
        value: object,
        problem: str,
        remedy: str,
        request_id: RequestId | None = None,
    ) -> None:
        super().__init__(field, value, problem, remedy)
        self.code = code
        self.request_id = request_id


class Fields:
    """The fields of one object; each is taken once, and none may be left over."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.id: RequestId | None = None
        self.id = self._take_id()

    def error(
        self,
        field: str,
        value: object,
        problem: str,
        remedy: str,
        code: ErrorCode = ErrorCode.BAD_MESSAGE,
    ) -> MessageError:
        shown = value[:200] if isinstance(value, str | list) else value
        return MessageError(code, field, shown, problem, remedy, self.id)

    def take(self, field: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A field of one JSON type; null is the same as absent."""
        value = self._fields.pop(field, None)
        if value is None and default is not _REQUIRED:
            return default
        if value is None:
            raise self.error(field, None, "missing", f"Add {field!r} ({_json_name(kind)}).")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(field, value, "of the wrong type", f"Send a {_json_name(kind)}.")
        if isinstance(value, str):
            self._check_unicode(field, value)
        return value

    def _check_unicode(self, field: str, value: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            remedy = "Send whole characters; a half of a surrogate pair is none."
            raise self.error(field, value, "invalid Unicode", remedy) from error

    def _take_id(self) -> RequestId | None:
        kind = int if isinstance(self._fields.get("id"), int) else str
        value: RequestId | None = self.take("id", kind, None)
        if isinstance(value, str) and len(value) > MAX_ID_CHARS:
            raise self.error("id", value, "too long", f"Use at most {MAX_ID_CHARS} characters.")
        if isinstance(value, int) and abs(value) >= 2**53:
            raise self.error("id", value, "too large", "Use a number below 2**53, or a string.")
        return value

    def version(self) -> int:
        version: int = self.take("version", int)
        if version != VERSION:
            remedy = f"This server speaks version {VERSION}."
            code = ErrorCode.UNSUPPORTED_VERSION
            raise self.error("version", version, "not spoken here", remedy, code)
        return version

    def text(self, field: str, default: Any = _REQUIRED) -> Any:
        return self.take(field, str, default)

    def name(self, field: str) -> str:
        name: str = self.take(field, str)
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise self.error(field, name, "bad length", f"Use 1 to {MAX_NAME_CHARS} characters.")
        return name

    def flag(self, field: str) -> bool:
        value: bool = self.take(field, bool, False)
        return value

    def feed(self) -> Feed:
        text, ids = self.take("text", str, None), self.take("ids", list, None)
        if (text is None) == (ids is None):
            raise self.error("text", text, "not one of text and ids", "Send exactly one of them.")
        for token_id in ids or ():
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                raise self.error("ids", token_id, "not a token id", "Send whole numbers from 0 on.")
        return Feed(self.id, text, ids)

    def params(self) -> dict[str, Any]:
        params = self.take("params", dict, {})
        if len(params) > MAX_PARAMS:
            remedy = f"Send at most {MAX_PARAMS} options."
            raise self.error("params", len(params), "too many options", remedy)
        return {name: self._param(name, value) for name, value in params.items()}

    def _param(self, name: str, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_PARAM_ITEMS:
            remedy = f"Send at most {MAX_PARAM_ITEMS} items."
            raise self.error(f"params.{name[:64]}", len(items), "too many items", remedy)
        for item in items:
            if isinstance(item, list | dict):
                remedy = "Send a number, a string, true, false, or a flat list of these."
                raise self.error(f"params.{name[:64]}", item, "nested", remedy)
            if isinstance(item, str):
                self._check_param_text(name, item)
            if isinstance(item, int) and abs(item) >= 2**64:
                remedy = "Use a number below 2**64."
                raise self.error(f"params.{name[:64]}", item, "too large", remedy)
        return tuple(value) if isinstance(value, list) else value

    def _check_param_text(self, name: str, value: str) -> None:
        self._check_unicode(f"params.{name[:64]}", value)
        if len(value) > MAX_PARAM_CHARS:
            remedy = f"Use at most {MAX_PARAM_CHARS} characters."
            raise self.error(f"params.{name[:64]}", value, "too long", remedy)

    def end(self, kind: str) -> None:
        for field, value in self._fields.items():
            raise self.error(field[:64], value, f"{kind} has no such field", "Leave it out.")


def _json_name(kind: type) -> str:
    names = {str: "string", int: "whole number", bool: "true or false", list: "list"}
    return names.get(kind, "object")
