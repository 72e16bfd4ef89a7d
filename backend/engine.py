"""The one door to compute: request in, result out, progress and cancel beside it.

Pages call ``submit`` (a job), ``peek`` (an answer that exists already) and ``estimate``; the command line calls
``run``. Nothing here names Streamlit or a session's state, so an engine that forwards requests to other machines can
stand behind the same methods. Torch and the models are imported at the first job, in the worker.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from backend import registry
from backend.errors import AppError, OutOfMemory
from backend.io import bundle
from backend.io.kept import KeptResults, Result
from backend.io.schema import SCHEMA_VERSION
from backend.jobs import JobQueue, Owner, Progress, Ticket
from backend.models.identity import downloaded, fingerprint
from backend.settings import Settings, get_settings
from backend.store import ResultStore, is_key
from backend.types import (
    Answer,
    AnswerRequest,
    CutRequest,
    Estimate,
    Explanation,
    FaithfulnessRequest,
    Intervention,
    InterventionRequest,
    MeasureRequest,
    ModelInfo,
    ModelRef,
    Passage,
    SaliencyRequest,
    SanityRequest,
    Tick,
    WorkRequest,
    cache_key,
    no_tick,
)

if TYPE_CHECKING:
    from backend.evaluation.faithfulness import Faithfulness
    from backend.evaluation.sanity import MethodSanity
    from backend.models.cutting import Cut
    from backend.models.hub import LoadedModel, ModelHub
    from backend.models.language import LanguageModel
    from backend.saliency.calibration import Calibration

log = logging.getLogger(__name__)

Request = WorkRequest | MeasureRequest
Outcome = Any  # a result to keep, or what another kind of request gives; see the overloads of ``Engine.run``
Stage = Callable[[str], None]

_WARM_UP_DELAY_S = 1.0  # imports hold the interpreter; the page that asked for them is drawn first
_FURTHER_GPU = re.compile(r"cuda:0*[1-9]\d*")


class Engine:
    """The in-process engine: one queue per device, one model hub, one result store."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or get_settings()
        self._store = ResultStore(
            self.settings.cache_dir / "results", limit_bytes=self.settings.store_limit_mb * 1_000_000
        )
        self._lock = threading.Lock()
        self._queues: dict[str, JobQueue] = {}
        self._devices: dict[str, threading.Lock] = {}
        self._kept = KeptResults(self._store)
        self._calibrations: dict[ModelInfo, Calibration] = {}
        self._infos: dict[ModelRef, ModelInfo] = {}
        self._hub: ModelHub | None = None
        self._warmed = False

    # ------------------------------------------------------------------------------------------ asking

    @overload
    def run(self, request: AnswerRequest, *, tick: Tick = ..., stage: Stage = ...) -> Answer: ...
    @overload
    def run(self, request: SaliencyRequest, *, tick: Tick = ..., stage: Stage = ...) -> Explanation: ...
    @overload
    def run(self, request: CutRequest, *, tick: Tick = ..., stage: Stage = ...) -> Cut: ...
    @overload
    def run(self, request: InterventionRequest, *, tick: Tick = ..., stage: Stage = ...) -> Intervention: ...
    @overload
    def run(self, request: FaithfulnessRequest, *, tick: Tick = ..., stage: Stage = ...) -> Faithfulness: ...
    @overload
    def run(self, request: SanityRequest, *, tick: Tick = ..., stage: Stage = ...) -> tuple[MethodSanity, ...]: ...
    @overload
    def run(self, request: MeasureRequest, *, tick: Tick = ..., stage: Stage = ...) -> ModelInfo: ...

    def run(self, request: Request, *, tick: Tick = no_tick, stage: Stage = lambda text: None) -> Outcome:
        """Answer a request in the calling thread, from the store if it was answered before.

        Args:
            request: The request.
            tick: Progress and cancellation, see ``backend.types.Tick``.
            stage: Called with a few words when the kind of work changes.

        Raises:
            AppError: With a sentence and a hint, where a person can do something about it.
            Cancelled: If ``tick`` raised it.
        """
        found = self.peek(request)
        if found is not None:
            return found
        files = fingerprint(request.model, self.settings)
        stage("Loading the model")
        with self._leased(request.model, tick) as model:
            if isinstance(request, MeasureRequest):
                self._calibrate(model, tick, stage)
                return model.info
            from backend.work import compute

            result = compute(model, request, self.settings, self._kept, tick, stage)
        if not isinstance(request, (AnswerRequest, SaliencyRequest)):
            return result
        # Files that changed under the run: whose result it is, nobody can say, so it is shown but not kept. Before a
        # first download there is nothing, or only the revision that was asked for.
        # Nor is a refusal: memory may be free next time, or weights fitted; scores of the others are kept one by one.
        refused = isinstance(result, Explanation) and any(method.refusal for method in result.results)
        if not refused and files in ("", request.model.revision, fingerprint(request.model, self.settings)):
            self._kept.put(self._key(request), result)
        return result

    def submit(self, owner: Owner, request: Request) -> Ticket:
        """Queue a request for an owner (session, panel); the owner's earlier request is cancelled.

        Raises:
            Busy: If the queue is full.
        """

        def work(progress: Progress) -> Outcome:
            return self.run(request, tick=progress.tick, stage=progress.stage)

        queue = self._queue(request.model)
        for other in self._all_queues():
            if other is not queue:
                other.forget(owner)  # the latest request wins on whichever device it is
        return queue.submit(owner, self._job_key(request), work)

    @overload
    def peek(self, request: AnswerRequest) -> Answer | None: ...
    @overload
    def peek(self, request: SaliencyRequest) -> Explanation | None: ...
    @overload
    def peek(self, request: Request) -> Result | None: ...

    def peek(self, request: Request) -> Result | None:
        """Return the answer if it exists already, without computing or loading anything."""
        if not isinstance(request, (AnswerRequest, SaliencyRequest)):
            return None
        return self._kept.get(self._key(request))

    def estimate(self, request: SaliencyRequest, passage: Passage) -> Estimate | None:
        """Say what a request on this passage will cost; None until its model has been measured (``MeasureRequest``)."""
        info = self.info(request.model)
        calibration = self._calibrations.get(info) if info else None
        if calibration is None:
            return None
        from backend.saliency.calibration import estimate

        return estimate(passage, request, calibration)

    # ------------------------------------------------------------------------------------------ tickets

    def ticket_for(self, owner: Owner, request: Request) -> Ticket | None:
        """Return the owner's ticket if it is for this very request, in whatever state."""
        ticket = self._queue(request.model).ticket(owner)
        return ticket if ticket is not None and ticket.key == self._job_key(request) else None

    def forget(self, owner: Owner) -> None:
        """Drop the owner's ticket, so that a cancelled or failed request may be asked again."""
        for queue in self._all_queues():
            queue.forget(owner)

    def drop_session(self, session: str) -> None:
        """Cancel what only this session wants; called when its browser tab is gone."""
        for queue in self._all_queues():
            queue.drop_session(session)

    # ------------------------------------------------------------------------------------------ keeping

    def save(self, result: Explanation) -> str:
        """Store a result under the hash of its content, for share links; return the hash."""
        data = bundle.encode(result)
        key = hashlib.sha256(data).hexdigest()
        self._kept.put(key, result, data)
        return key

    def load(self, key: str) -> Explanation | None:
        """Return a result saved under ``key``; None if there is none, or no longer."""
        result = self._kept.get(key) if is_key(key) else None
        return result if isinstance(result, Explanation) else None

    @property
    def store_trouble(self) -> str:
        """One sentence if results cannot be kept on disk at present, else empty."""
        return self._store.trouble

    # ------------------------------------------------------------------------------------------ life

    def warm_up(self) -> None:
        """Queue, once, what the first question would wait for: imports, the embedded model, timing its passes."""
        with self._lock:
            if self._warmed or not self.settings.warm_up:
                return
            self._warmed = True
        ref = ModelRef(device=self.settings.device, dtype=self.settings.dtype)
        self._queue(ref).submit(("engine", "warm-up"), "warm-up", self._warm)

    def readiness(self) -> dict[str, Any]:
        """Return what a health check wants to know. Never imports torch, never blocks on a job."""
        loads = [queue.load() for queue in self._all_queues()]
        last = self.last_model()
        return {
            "ready": True,
            "running": sum(running for running, _ in loads),
            "waiting": sum(waiting for _, waiting in loads),
            "device": last.device if last else self.settings.device,
            "models": [model.id for model in self.loaded_models()],
        }

    def loaded_models(self) -> tuple[LoadedModel, ...]:
        """Return the models in memory, most recently used first."""
        return () if self._hub is None else tuple(self._hub.loaded())

    def known_models(self) -> tuple[str, ...]:
        """Return the ids of downloaded models; they load without the hub."""
        return downloaded(self.settings)

    def last_model(self) -> ModelInfo | None:
        """Return the model that was loaded last by this process."""
        with self._lock:
            return next(reversed(self._infos.values()), None)

    def info(self, ref: ModelRef) -> ModelInfo | None:
        """Return what is known of a model that this process has loaded before."""
        with self._lock:
            return self._infos.get(ref)

    def is_loaded(self, ref: ModelRef) -> bool:
        """Whether a model is in memory now."""
        info = self.info(ref)
        return info is not None and any(model.info == info for model in self.loaded_models())

    def close(self) -> None:
        """Cancel all jobs, end the workers and close the store."""
        for queue in self._all_queues():
            queue.close()
        self._store.close()

    # ------------------------------------------------------------------------------------------ inside

    def _key(self, request: Request) -> str:
        files = fingerprint(request.model, self.settings)
        return cache_key(SCHEMA_VERSION, registry.METHODS_VERSION, request, files, self._placement())

    def _job_key(self, request: Request) -> str:
        # without the files' fingerprint: a download changes that while its own job is running
        return cache_key(request, self._placement())

    def _placement(self) -> list[str]:
        return [self.settings.device, self.settings.dtype]

    def _queue(self, ref: ModelRef) -> JobQueue:
        # Whether "auto" is a GPU shows only once torch is imported, so all names share the first device's worker;
        # further GPUs, which can only be asked for by number, have workers of their own.
        wanted = self.settings.device if ref.device == "auto" else ref.device
        name = wanted if _FURTHER_GPU.fullmatch(wanted) else "first"
        with self._lock:
            if name not in self._queues:
                self._queues[name] = JobQueue(
                    name, limit=self.settings.queue_limit, time_limit_s=self.settings.job_time_limit_s
                )
            return self._queues[name]

    def _all_queues(self) -> list[JobQueue]:
        with self._lock:
            return list(self._queues.values())

    @contextmanager
    def _leased(self, ref: ModelRef, tick: Tick) -> Iterator[LanguageModel]:
        """Hold the model and its device: no two jobs share either, even from different queues."""
        from backend.models.hub import ModelHub
        from backend.models.placement import is_out_of_memory

        with self._lock:
            if self._hub is None:
                self._hub = ModelHub(self.settings)
            hub = self._hub
        try:
            with hub.lease(ref, tick) as model:
                with self._device(model.info.device, tick):
                    with self._lock:
                        for name in {ref, model.ref}:
                            self._infos.pop(name, None)  # so that the last entry is the last one used
                            self._infos[name] = model.info
                    yield model
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                "The device ran out of memory.",
                "Use a shorter prompt, fewer steps or coarser units, a smaller model, or close other programs.",
            ) from None

    @contextmanager
    def _device(self, name: str, tick: Tick) -> Iterator[None]:
        with self._lock:
            lock = self._devices.setdefault(name, threading.Lock())
        while not lock.acquire(timeout=0.2):
            tick(0, 1)
        try:
            yield
        finally:
            lock.release()

    def _calibrate(self, model: LanguageModel, tick: Tick, stage: Stage) -> None:
        if model.info in self._calibrations:
            return
        from backend.saliency.calibration import calibrate

        stage("Measuring the model's speed")
        self._calibrations[model.info] = calibrate(model, tick)

    def _warm(self, progress: Progress) -> None:
        progress.stage("Preparing the embedded model")
        time.sleep(_WARM_UP_DELAY_S)
        try:
            with self._leased(ModelRef(), progress.tick) as model:
                self._calibrate(model, progress.tick, progress.stage)
        except AppError as error:
            log.warning("warm-up: %s", error)  # the first question will say it to a person
