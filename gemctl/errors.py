"""Errors that a user can act on, and the exit code of each.

Everything that the user can fix raises one of these; the command line prints the message alone. Any other exception is
a defect of gemctl and keeps its traceback.
"""

import errno
import os

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # a full disk, a quota or `ulimit -f`
# Refusals of the system with causes outside gemctl, if it names the file.
REFUSED = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ESTALE,
    errno.ENAMETOOLONG,
    errno.EMFILE,
    errno.ENFILE,
}
TERMINATED = 143  # exit code after SIGTERM, as in a shell


class GemctlError(Exception):
    """The run failed. The message says what is wrong, where (config key, file, rank), and what to do."""

    exit_code = 1


class InputError(GemctlError):
    """Bad input: `problems` holds every violation, one line each, found before anything was started."""

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Unreadable(InputError):
    """It exists, but cannot be read now: no permission, an I/O error, a format that only a newer gemctl reads.

    It may be intact, so it does not count as damaged: nothing is deleted, and nothing proceeds without it unless the
    user says so.
    """


class DoesNotFit(GemctlError):
    """The plan needs more than the cluster has; the message names the largest objects and the nearest change."""

    exit_code = 3


class TooFewHosts(GemctlError):
    """Fewer hosts than planned can take part. `lost`: some are dead or silent, so that other hosts may help."""

    def __init__(self, message: str, lost: bool) -> None:
        super().__init__(message)
        self.lost = lost


class Interrupted(GemctlError):
    """A signal ended the run; its progress is saved, and the message says how to resume.

    `exit_code`: as in a shell, 130 after Ctrl-C (SIGINT), 143 after SIGTERM.
    """

    exit_code = 130

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def os_problem(error: OSError) -> str | None:
    """Which file the system refused to read or write, and why; None for an error that is gemctl's own fault."""
    if error.errno not in FULL and not (error.errno in REFUSED and error.filename):
        return None
    return f"{error.filename or 'a file'}: {os.strerror(error.errno or 0)}"
