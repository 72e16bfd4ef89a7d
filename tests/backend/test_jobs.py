"""The queue: latest wins, one computation for many, sticky states, bounds, cancellation within a step."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from backend.errors import AppError, Busy, TimeLimit
from backend.jobs import JobQueue, Progress, Ticket


@pytest.fixture
def queue() -> Iterator[JobQueue]:
    queue = JobQueue("test", limit=3)
    yield queue
    queue.close()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


class Steps:
    """Work of many steps; each waits for the test to let it go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.steps = 0
        self.runs = 0

    def __call__(self, progress: Progress) -> str:
        self.runs += 1
        self.begun.set()
        for step in range(1000):
            progress.tick(step, 1000)
            self.steps += 1
            if self.go.wait(0.01):
                return "result"
        raise AssertionError("nobody let the work finish")


def test_a_job_runs_and_reports_progress(queue: JobQueue) -> None:
    work = Steps()
    ticket = queue.submit(("a", "p"), "k", work)
    work.begun.wait(5)
    until(lambda: ticket.progress[0] > 2)
    assert ticket.state == "running"
    assert ticket.result is None
    work.go.set()
    until(lambda: ticket.state == "done")
    assert ticket.result == "result"
    assert queue.submit(("a", "p"), "k", work) is ticket


def test_the_latest_request_of_an_owner_wins(queue: JobQueue) -> None:
    works = [Steps() for _ in range(6)]
    tickets: list[Ticket] = []
    for number, work in enumerate(works):  # six quick moves of a slider
        tickets.append(queue.submit(("a", "p"), f"k{number}", work))
    works[-1].go.set()
    until(lambda: tickets[-1].state == "done")
    assert [ticket.state for ticket in tickets] == ["cancelled"] * 5 + ["done"]
    assert sum(work.runs for work in works[1:-1]) == 0


def test_the_same_request_from_two_sessions_computes_once(queue: JobQueue) -> None:
    work = Steps()
    first = queue.submit(("a", "p"), "k", work)
    second = queue.submit(("b", "p"), "k", work)
    first.cancel()
    work.begun.wait(5)
    work.go.set()
    until(lambda: second.state == "done")
    assert work.runs == 1
    assert first.state == "cancelled"
    assert second.result == "result"


def test_cancel_takes_effect_within_one_step_and_stays(queue: JobQueue) -> None:
    work = Steps()
    ticket = queue.submit(("a", "p"), "k", work)
    work.begun.wait(5)
    steps = work.steps
    ticket.cancel()
    until(lambda: queue.load() == (0, 0))
    assert work.steps - steps <= 2
    assert queue.submit(("a", "p"), "k", work) is ticket
    assert ticket.state == "cancelled"
    queue.forget(("a", "p"))
    work.go.set()
    again = queue.submit(("a", "p"), "k", work)
    until(lambda: again.state == "done")
    assert work.runs == 2


def test_a_job_cancelled_while_waiting_never_starts(queue: JobQueue) -> None:
    busy, waiting = Steps(), Steps()
    queue.submit(("a", "p"), "k1", busy)
    busy.begun.wait(5)
    ticket = queue.submit(("b", "p"), "k2", waiting)
    assert (ticket.state, ticket.ahead) == ("waiting", 1)
    ticket.cancel()
    assert queue.load() == (1, 0)
    busy.go.set()
    until(lambda: queue.load() == (0, 0))
    assert waiting.runs == 0


def test_the_queue_is_bounded_and_shows_positions(queue: JobQueue) -> None:
    busy = Steps()
    queue.submit(("s0", "p"), "k0", busy)
    busy.begun.wait(5)
    tickets = [queue.submit((f"s{n}", "p"), f"k{n}", Steps()) for n in (1, 2, 3)]
    assert [ticket.ahead for ticket in tickets] == [1, 2, 3]
    with pytest.raises(Busy, match="3 jobs are waiting"):
        queue.submit(("s4", "p"), "k4", Steps())
    # replacing one's own waiting request is no additional job
    assert queue.submit(("s3", "p"), "k5", Steps()).state == "waiting"
    assert tickets[2].state == "cancelled"


def test_closing_the_tab_frees_the_jobs_of_its_session_only(queue: JobQueue) -> None:
    mine, other = Steps(), Steps()
    gone = queue.submit(("a", "p"), "k1", mine)
    stays = queue.submit(("b", "p"), "k2", other)
    mine.begun.wait(5)
    queue.drop_session("a")
    other.go.set()
    until(lambda: stays.state == "done")
    assert gone.state == "cancelled"
    assert queue.ticket(("a", "p")) is None


def test_a_failure_is_kept_without_its_traceback(queue: JobQueue) -> None:
    class Tensor:
        pass

    seen: list[weakref.ref[Tensor]] = []

    def work(progress: Progress) -> None:
        tensor = Tensor()
        seen.append(weakref.ref(tensor))
        raise AppError("It broke.", "Mend it.")

    ticket = queue.submit(("a", "p"), "k", work)
    until(lambda: ticket.state == "failed")
    assert ticket.error is not None
    assert (ticket.error.message, ticket.error.hint) == ("It broke.", "Mend it.")
    gc.collect()
    assert seen[0]() is None, "the traceback keeps the objects of the failed run alive"


def test_an_unexpected_error_becomes_a_sentence_and_the_worker_lives(queue: JobQueue) -> None:
    def broken(progress: Progress) -> None:
        raise ZeroDivisionError("secret path /etc")

    ticket = queue.submit(("a", "p"), "k", broken)
    until(lambda: ticket.state == "failed")
    assert ticket.error is not None
    assert "secret" not in str(ticket.error)
    work = Steps()
    work.go.set()
    after = queue.submit(("a", "p"), "k2", work)
    until(lambda: after.state == "done")


def test_a_job_is_stopped_at_its_time_limit() -> None:
    queue = JobQueue("short", time_limit_s=0.05)
    ticket = queue.submit(("a", "p"), "k", Steps())
    until(lambda: ticket.state == "failed")
    assert isinstance(ticket.error, TimeLimit)
    queue.close()


def test_a_panic_of_a_compiled_library_does_not_end_the_worker(queue: JobQueue) -> None:
    class Panic(BaseException):
        pass

    def work(progress: Progress) -> None:
        raise Panic

    broken = queue.submit(("a", "p"), "broken", work)
    until(lambda: not broken.active)
    assert broken.state == "failed"
    sound = queue.submit(("a", "p"), "sound", lambda progress: 1)
    until(lambda: not sound.active)
    assert sound.result == 1


def test_a_closed_queue_takes_no_job(queue: JobQueue) -> None:
    queue.close()
    with pytest.raises(Busy, match="shutting down"):
        queue.submit(("a", "p"), "k", lambda progress: 1)
