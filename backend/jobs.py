"""The job queue of one device: one worker, progress, cancellation. Knows nothing of what a job computes.

* A *ticket* is one owner's claim on a job; an owner is a (session, panel) pair and holds one ticket at a time, so the
  latest request wins. Tickets with the same key share one job: it computes once, and stops only when all let go.
* Cancelled and failed tickets stay so until ``forget``; otherwise the next page run would start them again, for ever.
* A job hears of its cancellation in ``tick``; that is at most one step of the method away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from backend.errors import AppError, Busy, Cancelled, TimeLimit

State = Literal["waiting", "running", "done", "failed", "cancelled"]
Owner = tuple[str, str]

log = logging.getLogger(__name__)


class Progress:
    """What a running job sees of the queue: report steps, name the stage, learn of cancellation."""

    def __init__(self, job: _Job, time_limit_s: float) -> None:
        self._job = job
        self._limit = time_limit_s

    def tick(self, done: int, total: int) -> None:
        """Store progress.

        Raises:
            Cancelled: If nobody wants the result any more.
            TimeLimit: If the job has run past its limit.
        """
        if self._job.cancel.is_set():
            raise Cancelled
        if time.monotonic() - self._job.started > self._limit:
            raise TimeLimit(
                f"The run was stopped after {self._limit:.0f} seconds.",
                "Shorten the prompt, choose coarser units or fewer steps, or raise ATTRISCOPE_JOB_TIME_LIMIT_S.",
            )
        self._job.done, self._job.total = done, max(total, 1)

    def stage(self, text: str) -> None:
        """Name what is happening now ("Loading the model"), and start its progress at zero."""
        self._job.stage = text
        self.tick(0, 1)


@dataclass(eq=False)
class _Job:
    key: str
    work: Callable[[Progress], Any]
    state: State = "waiting"
    stage: str = ""
    done: int = 0
    total: int = 1
    started: float = 0.0
    finished: float = 0.0
    result: Any = None
    error: AppError | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    tickets: set[Ticket] = field(default_factory=set)


class Ticket:
    """One owner's claim on a job. Read from any thread."""

    def __init__(self, owner: Owner, job: _Job, queue: JobQueue) -> None:
        self.owner = owner
        self._job = job
        self._queue = queue
        self._let_go = False

    @property
    def key(self) -> str:
        """Content key of the request."""
        return self._job.key

    @property
    def state(self) -> State:
        """Where the job stands, as this owner sees it."""
        return "cancelled" if self._let_go else self._job.state

    @property
    def active(self) -> bool:
        """Whether a result may still come."""
        return self.state in ("waiting", "running")

    @property
    def progress(self) -> tuple[int, int]:
        """Steps done and steps in total, as the method reported them."""
        return self._job.done, self._job.total

    @property
    def stage(self) -> str:
        """What the job is doing."""
        return self._job.stage

    @property
    def ahead(self) -> int:
        """Number of jobs that run before this one; 0 when it runs."""
        return self._queue.ahead(self._job)

    @property
    def blocked_by(self) -> str:
        """What the job that runs now is doing, while this one waits."""
        return self._queue.stage() if self.state == "waiting" else ""

    @property
    def seconds(self) -> float:
        """Seconds since the job started; 0 while it waits."""
        if not self._job.started:
            return 0.0
        return (self._job.finished or time.monotonic()) - self._job.started

    @property
    def result(self) -> Any:
        """The result when done, else None."""
        return self._job.result if self.state == "done" else None

    @property
    def error(self) -> AppError | None:
        """The error when failed, else None."""
        return self._job.error if self.state == "failed" else None

    def cancel(self) -> None:
        """Let go of the job; it stops at its next tick unless another owner wants it too."""
        self._queue.release(self)

    def _drop(self) -> None:
        self._let_go = True


class JobQueue:
    """A bounded first-in-first-out queue with one worker thread."""

    def __init__(self, name: str, *, limit: int = 16, time_limit_s: float = 1800.0) -> None:
        self._limit = limit
        self._time_limit_s = time_limit_s
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._tickets: dict[Owner, Ticket] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"jobs-{name}", daemon=True)
        self._thread.start()

    def submit(self, owner: Owner, key: str, work: Callable[[Progress], Any]) -> Ticket:
        """Ask for a job. Asking again with the same key returns the same ticket, whatever its state.

        Raises:
            Busy: If the queue is full or closed.
        """
        with self._changed:
            if self._closed:
                raise Busy("The application is shutting down.", "Start it again.")
            held = self._tickets.get(owner)
            if held is not None and held.key == key:
                return held
            job = self._find(key)
            if job is None:
                # the owner's own waiting job is about to leave; it must not block its successor
                leaving = held is not None and held.state == "waiting" and len(held._job.tickets) == 1
                if len(self._waiting) - leaving >= self._limit:
                    raise Busy(
                        f"{len(self._waiting)} jobs are waiting already; the queue takes no more.",
                        "Try again in a minute.",
                    )
                job = _Job(key, work)
                self._waiting.append(job)
            if held is not None:
                self._release(held)
            ticket = Ticket(owner, job, self)
            job.tickets.add(ticket)
            self._tickets[owner] = ticket
            self._changed.notify_all()
            return ticket

    def ticket(self, owner: Owner) -> Ticket | None:
        """Return the owner's ticket, if it holds one."""
        with self._changed:
            return self._tickets.get(owner)

    def forget(self, owner: Owner) -> None:
        """Drop the owner's ticket, so that the same request may be submitted again."""
        with self._changed:
            ticket = self._tickets.pop(owner, None)
            if ticket is not None:
                self._release(ticket)

    def drop_session(self, session: str) -> None:
        """Drop all tickets of a session; jobs that nobody else wants are cancelled."""
        with self._changed:
            for owner in [owner for owner in self._tickets if owner[0] == session]:
                self._release(self._tickets.pop(owner))

    def release(self, ticket: Ticket) -> None:
        """Let go of a job; see ``Ticket.cancel``."""
        with self._changed:
            self._release(ticket)

    def ahead(self, job: _Job) -> int:
        """Number of jobs that finish before ``job`` starts."""
        with self._changed:
            if job not in self._waiting:
                return 0
            return self._waiting.index(job) + (self._running is not None)

    def stage(self) -> str:
        """What the running job is doing; empty if none runs."""
        running = self._running
        return running.stage if running else ""

    def load(self) -> tuple[int, int]:
        """Return how many jobs run (0 or 1) and how many wait."""
        with self._changed:
            return int(self._running is not None), len(self._waiting)

    def close(self) -> None:
        """Cancel everything and end the worker."""
        with self._changed:
            self._closed = True
            for ticket in self._tickets.values():
                self._release(ticket)
            self._tickets.clear()
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _find(self, key: str) -> _Job | None:
        candidates = [*self._waiting, *([self._running] if self._running else [])]
        return next((job for job in candidates if job.key == key and not job.cancel.is_set()), None)

    def _release(self, ticket: Ticket) -> None:
        job = ticket._job
        job.tickets.discard(ticket)
        if not ticket.active:
            return
        ticket._drop()
        if not job.tickets:
            job.cancel.set()
            if job in self._waiting:
                self._waiting.remove(job)
                job.state = "cancelled"

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                job = self._running = self._waiting.popleft()
                job.started = time.monotonic()
                job.state = "running"
            result, error, state = self._run(job)
            with self._changed:
                job.result, job.error, job.state = result, error, state
                job.finished = time.monotonic()
                self._running = None
            del job, result, error

    def _run(self, job: _Job) -> tuple[Any, AppError | None, State]:
        progress = Progress(job, self._time_limit_s)
        try:
            progress.tick(0, 1)
            return job.work(progress), None, "done"
        except Cancelled:
            return None, None, "cancelled"
        except AppError as error:
            return None, _bare(error), "failed"
        except BaseException:  # the worker must outlive any job, also panics of compiled libraries
            log.exception("job %s failed", job.key[:12])
            failure = AppError(
                "Something went wrong inside the application.",
                "The server's log has the details. Try again, or try a smaller input.",
            )
            return None, failure, "failed"


def _bare(error: AppError) -> AppError:
    """Strip the traceback: it would keep every tensor of the failed run alive."""
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
    return error
