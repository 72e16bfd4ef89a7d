"""Errors that a person can act on. Each holds one sentence that says what is wrong and one that says what to do.

Raised where the fact is known; shown in one place (``components/page.py``, or the command line's ``main``).
"""

from __future__ import annotations


class AppError(Exception):
    """Base of all errors that are shown to a person.

    Attributes:
        message: What is wrong, one plain sentence.
        hint: What to do about it, one plain sentence; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class BadRequest(AppError):
    """The question itself cannot be answered: empty prompt, unknown target, parameter out of range."""


class PromptTooLong(BadRequest):
    """The prompt exceeds a limit; carries the counts, so that a page can offer to cut it.

    Attributes:
        tokens: Number of tokens of the prompt (0 if only characters were counted).
        limit: The limit that was exceeded, in the same unit.
    """

    def __init__(self, message: str, hint: str = "", *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, hint)
        self.tokens = tokens
        self.limit = limit


class UnknownMethod(BadRequest):
    """No method of this name is registered."""


class NotApplicable(AppError):
    """This method cannot serve this model or this question; the message says why."""


class ModelUnavailable(AppError):
    """The model cannot be had: unknown, gated, unreachable hub, wrong architecture, missing or damaged file."""


class OutOfMemory(AppError):
    """The device ran out of memory."""


class Busy(AppError):
    """The queue is full."""


class TimeLimit(AppError):
    """The job ran past its time limit."""


class StoreProblem(AppError):
    """A stored result cannot be read, or the disk refused to take one."""


class BadFile(AppError):
    """An imported file is not what it should be."""


class Cancelled(Exception):
    """The job was cancelled. Never shown as an error."""
