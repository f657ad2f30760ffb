"""Patterns and formats of JSON Schema, as regular expressions of llguidance with their meaning or a narrower one.

The patterns are searched for, not matched to a whole text, unless they have anchors.
"""

from __future__ import annotations

import re

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # no year 0: most languages have none
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAYS = f"(?:{_LONG_MONTH}|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](?:[.][0-9]{{1,6}})?(?:Z|[+-]{_HOURS})"  # no leap seconds: which exist is no pattern
_BASE64, _BASE64URL = (
    f"(?:{letter}{{4}})*(?:{letter}{{2}}==|{letter}{{3}}=)?" for letter in ("[A-Za-z0-9+/]", "[A-Za-z0-9_-]")
)
_POINTER = "(?:/(?:[^~/]|~0|~1)*)*"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "byte": f"^{_BASE64}$",
    "base64": f"^{_BASE64}$",
    "base64url": f"^{_BASE64URL}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""Format to the pattern that stands for it: what llguidance lacks, or holds too loosely (it has a 30 February)."""

NATIVE_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance holds."""

UNCHECKED_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path", "float", "double"})
"""Formats that say what a value is for, not how it is written."""

INTEGER_FORMATS = {"int32": 2**31, "int64": 2**53}
"""Format to a bound of its values (int64's as far as a double holds every whole number)."""


_CONTROL_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_CONTROL_ESCAPE = rf"\\(?:x{_CONTROL_CODE}|u00{_CONTROL_CODE}|[xu]\{{0*{_CONTROL_CODE}\}}|[av])"
_CONTROL = rf"(?:[\x00-\x07\x0b\x0e-\x1f\x7f]|{_CONTROL_ESCAPE})"
_TOKEN = re.compile(rf"(?P<class>\[(?:\\.|[^]\\])*\])|(?P<control>{_CONTROL})|\\.|.", re.DOTALL)
_CONTROLS_ONLY = re.compile(rf"\[(?:{_CONTROL}|-)+\]")


def ecma_pattern(pattern: str) -> str:
    """The same pattern in the regular expressions that llguidance reads. Raises `ValueError` where there is none.

    In ECMA-262 a class knows no class inside it and no set operations: `[[:a]` and `[a&&b]` list characters.
    """
    return "".join(_translated(token) for token in _TOKEN.finditer(pattern))


def has_control(text: str) -> bool:
    """Whether a text has a character that no JSON string of ours has: llguidance would leave it out of the text."""
    return re.search("[\x00-\x07\x0b\x0e-\x1f\x7f]", text) is not None


def _translated(token: re.Match[str]) -> str:
    listed = token["class"]
    if listed is None:
        if token["control"]:
            raise ValueError(f"the control character {token[0]!r} cannot be written")
        return token[0]
    if listed in ("[]", "[^]"):
        raise ValueError("an empty character class is not known")
    if _CONTROLS_ONLY.fullmatch(listed):
        raise ValueError(f"the control characters {listed!r:.80} cannot be written")
    inside = re.sub(r"\\.|[\[&~]", lambda found: found[0] if len(found[0]) > 1 else "\\" + found[0], listed[1:-1])
    return f"[{inside}]"
