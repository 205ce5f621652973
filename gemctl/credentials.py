"""Credentials in URLs: rejected in input, masked in everything that is shown or stored.

    refusal("s3://KEY:SECRET@bucket/a.parquet")     # why it is rejected, and what to do instead
    masked("s3://KEY:SECRET@bucket/a.parquet")      # s3://***@bucket/a.parquet

A command line is visible in `ps` and in the shell's history, a configuration in every attempt of a run.
"""

import re

MASK = "***"
# Each pattern takes time linear in the text, which may be a hostile line, and tokens of any length.
_UP_TO_HOST = re.compile(r"[^\s@]++(?:@(?:[^\s/?#@]*+@)*+)?")  # a password may have slashes or an @ in it
_BUCKET = r"(?:(?<=s3://)|(?<=s3a://)|(?<=gs://)|(?<=gcs://))[^\s/@:]*+:"  # a bucket has no port
_HOST = r"(?<=://)[^\s/@:]*+:(?!\d{1,5}[/?#])"  # host:8080/a@b has no password
_PASSWORD = re.compile(f"{_BUCKET}|{_HOST}", re.IGNORECASE)
_TOKEN = re.compile(r"(?:(?<=http://)|(?<=https://))[^/]++$", re.IGNORECASE)  # http takes it for a user name
_WORDS = "token|signature|secret|passw(?:or)?d|passphrase|credential|bearer|jwt|(?:api|access|account|private)[_-]?key"
_NAME = rf"[\w.%-]{{0,64}}(?:{_WORDS})[\w.%-]{{0,64}}|sig|key|auth|pwd"
_QUERY = re.compile(rf"(?<=[?&#;])((?:{_NAME})=)[^&#\s'\"]+", re.IGNORECASE)
_URL = "://"


def masked(text: str) -> str:
    """The text without the credentials of its URLs."""
    if _URL not in text:
        return text
    return _QUERY.sub(rf"\1{MASK}", _UP_TO_HOST.sub(_without_user, text))


def _without_user(found: re.Match[str]) -> str:
    """The text up to the @ of a URL, without the user before it."""
    text = found[0]
    user = (_PASSWORD.search(text) or _TOKEN.search(text)) if text.endswith("@") else None
    return f"{text[: user.start()]}{MASK}@" if user else text


def refusal(text: str) -> str | None:
    """Why this value is rejected; None if it has no URL with credentials."""
    if masked(text) == text:
        return None
    return (
        "a URL with credentials would be visible in ps, in the run's files and in reports; leave them out: fsspec "
        "reads them from the storage's own files and variables, or from ~/.config/fsspec (docs/security.md)"
    )
