"""Credentials in URLs: refused where they are asked for, masked in all that is shown or kept.

    refusal("s3://KEY:SECRET@bucket/a.parquet")     # why it is not taken, and what to do instead
    masked("s3://KEY:SECRET@bucket/a.parquet")      # s3://***@bucket/a.parquet

A command line stands in `ps` and in the shell's history, a configuration in every attempt of a run.
"""

import re

MASK = "***"
# A password, which may have slashes in it, or the token that http takes for a user; host:8080/a@b is no password.
# Bounds keep the time linear in the length of what may be a hostile line.
_PASSWORD = r"[^\s/@:]{0,300}:(?!\d{1,5}(?:[/?#]|$))[^\s@]{0,300}"
_USER = re.compile(rf"(?<=://)(?:{_PASSWORD}|(?<=http://)[^\s/@]{{1,300}}|(?<=https://)[^\s/@]{{1,300}})@")
_WORDS = "token|signature|secret|password|passwd|credential|api[_-]?key|accesskeyid"
_NAME = rf"[\w.%-]{{0,64}}(?:{_WORDS})[\w.%-]{{0,64}}|sig|key|auth|pwd"
_QUERY = re.compile(rf"(?<=[?&])((?:{_NAME})=)[^&#\s'\"]+", re.IGNORECASE)
_URL = "://"


def masked(text: str) -> str:
    """The text without the credentials of its URLs."""
    if _URL not in text:
        return text
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", text))


def refusal(text: str) -> str | None:
    """Why this value is not taken; None if it has no URL with credentials."""
    if masked(text) == text:
        return None
    return (
        "a URL with credentials would stand in ps, in the run's files and in reports; leave them out: fsspec takes "
        "them from the storage's own files and variables, or from ~/.config/fsspec (docs/security.md)"
    )
