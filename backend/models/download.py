"""Downloads from a model hub: which files, into the cache folder, with sentences for everything that goes wrong.

Knows the hub's client library; knows neither torch nor what the files mean beyond their names. Only JSON, tokenizer
and safetensors files are ever fetched, never pickles or program code. The hub's address comes from the settings, the
model's name from the person, checked by ``REPO_ID``.

Every request runs in a thread of its own that the job does not wait for beyond a limit: resolving a name, connecting
and reading each have their own time limit in the client, or none, and their sum would keep a person waiting.
"""

from __future__ import annotations

import errno
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from backend.errors import ModelUnavailable
from backend.models.architecture import check_architecture, read_config
from backend.models.weights import INDEX, SINGLE, index_files
from backend.settings import Settings
from backend.types import Tick

REPO_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
REVISION = re.compile(r"[\w.][\w./-]{0,199}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")

_SMALL_FILES = (".json", ".jinja", ".txt", ".model")  # configuration, tokenizer, template; fetched before the weights
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
_STALL_S = 30.0  # a download without a single byte for this long has stalled; hubs are slow at times, never that slow

T = TypeVar("T")


class HubUnreachable(ModelUnavailable):
    """The hub did not answer; what is cached may still serve."""


def download_model(
    repo_id: str, revision: str | None, settings: Settings, tick: Tick, approve: Callable[[int], None] | None = None
) -> tuple[Path, str]:
    """Fetch what is missing of a model and return its folder and commit.

    Args:
        repo_id: Name on the hub, matching ``REPO_ID``.
        revision: Branch, tag or commit; None for the default branch.
        settings: Address of the hub, time limit, cache folder.
        tick: Reports bytes of the weights; a cancelled job leaves at once, its transfer ends at the next chunk.
        approve: Called with the size of the weights in bytes before they are fetched; may raise to refuse them.

    Raises:
        HubUnreachable: If the hub does not answer within the settings' limit.
        ModelUnavailable: For everything else, each with a sentence of its own.
    """
    api = HfApi(endpoint=settings.hub_endpoint.rstrip("/"))
    wanted = revision or "main"
    with _sentences(repo_id, wanted, settings):
        hub_cache(settings).mkdir(parents=True, exist_ok=True)
        info = _in_background(
            lambda _: api.model_info(repo_id, revision=wanted, timeout=settings.hub_timeout_s, files_metadata=True),
            tick,
            settings.hub_timeout_s + 0.5,
        )
    commit = str(info.sha)
    if not COMMIT.fullmatch(commit):
        raise ModelUnavailable(f"{settings.hub_endpoint} does not answer like a model hub.", "Check the address.")
    sizes = {s.rfilename: int(s.size or 0) for s in info.siblings or () if "/" not in s.rfilename}
    folder = hub_cache(settings) / f"models--{repo_id.replace('/', '--')}"
    job = _Download(repo_id, wanted, commit, settings, tick)

    # Small files come first: a model of the wrong kind is refused before its weights are fetched, and a folder that
    # has its weights is complete.
    small = [n for n in sizes if n.endswith(_SMALL_FILES) and n != INDEX]
    _check_names(repo_id, sizes)
    snapshot = folder / "snapshots" / commit
    job.fetch([n for n in ("config.json",) if n in sizes], sizes)
    check_architecture(read_config(snapshot))
    job.fetch([n for n in small if n != "config.json"], sizes)
    weights = [SINGLE]
    if SINGLE not in sizes:
        job.fetch([INDEX], sizes)
        weights = index_files(snapshot / INDEX)
    missing = [n for n in weights if not (snapshot / n).is_file()]
    size = sum(sizes.get(n, 0) for n in missing)
    if approve and missing:
        approve(sum(sizes.get(n, 0) for n in weights))
    _check_disk(settings, size)
    job.fetch(missing, sizes)
    with _sentences(repo_id, wanted, settings):
        _write_ref(folder, wanted, commit)
    return snapshot, commit


def hub_cache(settings: Settings) -> Path:
    """Return the folder of downloaded models, laid out as the hub's client does."""
    return settings.cache_dir / "hub"


def _check_names(repo_id: str, sizes: dict[str, int]) -> None:
    if SINGLE in sizes or INDEX in sizes:
        return
    if any(name.endswith(".gguf") for name in sizes):
        raise ModelUnavailable(
            f"{repo_id} holds GGUF files and no safetensors.", "Download one of them and give its path."
        )
    if any(name.endswith(_PICKLES) for name in sizes):
        raise ModelUnavailable(
            f"{repo_id} has no safetensors weights, only files that can run code when they are opened.",
            "Choose a revision or a copy with safetensors.",
        )
    raise ModelUnavailable(f"{repo_id} has no weights on the hub.", f"A model needs {SINGLE} or {INDEX}.")


def _check_disk(settings: Settings, size: int) -> None:
    free = shutil.disk_usage(settings.cache_dir).free
    if size > free:
        raise _disk_full(settings, f"{size / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")


def _disk_full(settings: Settings, detail: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"The disk of the cache folder {settings.cache_dir} is full: {detail}.",
        "Free some space, or set ATTRISCOPE_CACHE_DIR to another disk.",
    )


def _write_ref(folder: Path, revision: str, commit: str) -> None:
    """Note which commit a branch stands for, once its files are complete: without the hub, this one is used."""
    if COMMIT.fullmatch(revision):
        return
    ref = folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f"{ref.name}.{threading.get_ident()}.new")
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(ref)


@dataclass(slots=True)
class _Download:
    """One model's files, fetched one after the other."""

    repo_id: str
    revision: str
    commit: str
    settings: Settings
    tick: Tick
    done: int = 0

    def fetch(self, names: list[str], sizes: dict[str, int]) -> None:
        total = self.done + sum(sizes.get(name, 0) for name in names)
        for name in names:
            with _sentences(self.repo_id, self.revision, self.settings, name):
                _in_background(partial(self._one, name), self.tick, _STALL_S, start=self.done, total=max(total, 1))
            self.done += sizes.get(name, 0)

    def _one(self, name: str, watch: _Watch) -> str:
        return hf_hub_download(
            self.repo_id,
            name,
            revision=self.commit,
            cache_dir=hub_cache(self.settings),
            endpoint=self.settings.hub_endpoint.rstrip("/"),
            etag_timeout=self.settings.hub_timeout_s,
            tqdm_class=watch.meter(),
        )


@dataclass(slots=True)
class _Watch:
    """What a transfer thread and the waiting job tell each other."""

    done: int = 0
    last: float = field(default_factory=time.monotonic)
    stopped: bool = False

    def meter(self) -> type[Any]:
        """Return a progress bar for the client that draws nothing, counts bytes and ends an abandoned transfer."""
        watch = self

        class Meter(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("name", None)
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if watch.stopped:
                    raise ConnectionAbortedError("nobody waits for this download any more")
                watch.done += int(n or 0)
                watch.last = time.monotonic()
                return None

        return Meter


def _in_background(work: Callable[[_Watch], T], tick: Tick, silence_s: float, *, start: int = 0, total: int = 1) -> T:
    """Run ``work`` in a thread and wait for it, as long as it shows signs of life.

    Raises:
        TimeoutError: If nothing happened for ``silence_s`` seconds.
    """
    watch = _Watch()
    box: list[tuple[bool, Any]] = []
    finished = threading.Event()

    def run() -> None:
        try:
            box.append((True, work(watch)))
        except Exception as error:  # noqa: BLE001 - carried to the waiting thread and raised there
            box.append((False, error))
        finished.set()

    threading.Thread(target=run, name="hub", daemon=True).start()
    try:
        while not finished.wait(0.1):
            tick(min(start + watch.done, total), total)
            if time.monotonic() - watch.last > silence_s:
                raise TimeoutError(f"no answer within {silence_s:.0f} s")
    finally:
        watch.stopped = True
    succeeded, value = box[0]
    if succeeded:
        return value  # type: ignore[no-any-return]
    raise value


@contextmanager
def _sentences(repo_id: str, revision: str, settings: Settings, file: str = "") -> Iterator[None]:
    """Turn the client's errors into sentences."""
    hub = settings.hub_endpoint
    try:
        yield
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{repo_id} is gated: its owner must grant you access first.",
            f"Ask for access on {hub}, log in with: hf auth login, then try again.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"There is no model named {repo_id!r} on {hub}, or it is private.", "Check the spelling: owner/name."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelUnavailable(
            f"The model {repo_id} has no revision {revision!r}.", "Use a branch, tag or commit of that model, or none."
        ) from error
    except LocalEntryNotFoundError as error:  # the client's words for a connection that failed midway
        raise HubUnreachable(f"The connection to {hub} was lost.", "Check the network and try again.") from error
    except EntryNotFoundError as error:
        raise ModelUnavailable(
            f"The model {repo_id} is incomplete on the hub: the file {file} is missing.", "Choose another revision."
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachable("The model hub is switched off by HF_HUB_OFFLINE.", "Unset it to download.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        busy = status in {429, 500, 502, 503, 504}
        raise (HubUnreachable if busy else ModelUnavailable)(
            f"{hub} answered with the error {status}.",
            "Try again in a minute." if busy else "Check your access to this model.",
        ) from error
    except (httpx.HTTPError, TimeoutError, ConnectionError) as error:
        raise HubUnreachable(
            f"{hub} cannot be reached.",
            "Check the network, choose the embedded model or a local folder, or try again later.",
        ) from error
    except (httpx.InvalidURL, HFValidationError) as error:
        raise ModelUnavailable(f"{hub} is not the address of a model hub.", "Check ATTRISCOPE_HUB_ENDPOINT.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ModelUnavailable(f"{hub} does not answer like a model hub.", "Check ATTRISCOPE_HUB_ENDPOINT.") from error
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _disk_full(settings, "a download could not be written") from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}:
            raise ModelUnavailable(
                f"The cache folder {settings.cache_dir} cannot be written: {error.strerror}.",
                "Set ATTRISCOPE_CACHE_DIR to a folder that you may write.",
            ) from error
        raise HubUnreachable(f"The download of {file or repo_id} broke off.", "Try again.") from error
