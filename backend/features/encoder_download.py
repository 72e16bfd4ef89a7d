"""Encoders from a model hub: configuration and one safetensors file, into the cache folder. Imports no torch.

Knows the hub's client; never fetches pickles or program code.
"""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from backend.errors import BadRequest, ModelUnavailable
from backend.models.download import REPO_ID, hub_cache
from backend.settings import Settings
from backend.types import Tick, no_tick

_FILES = [
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
]


def download_encoder(repo_id: str, settings: Settings, tick: Tick = no_tick) -> Path:
    """Fetch what is missing of an encoder and return its folder.

    Args:
        repo_id: "owner/name" on the hub; timm's models are under "timm/".
        settings: Hub address, cache folder, offline switch.
        tick: Called before and after; a transfer itself cannot be interrupted.

    Raises:
        BadRequest: If the id cannot be a name on a hub.
        ModelUnavailable: If it cannot be had, with one sentence for each reason.
    """
    if not REPO_ID.fullmatch(repo_id) or "/" not in repo_id:
        raise BadRequest(
            f"{repo_id!r} is neither a folder nor a name on a hub.", 'Names look like "timm/vit_small_patch14_dinov2".'
        )
    tick(0, 1)
    try:
        folder = snapshot_download(
            repo_id,
            cache_dir=hub_cache(settings),
            endpoint=settings.hub_endpoint.rstrip("/"),
            allow_patterns=_FILES,
            local_files_only=settings.offline,
            etag_timeout=settings.hub_timeout_s,
        )
    except GatedRepoError:
        raise ModelUnavailable(
            f"{repo_id} is gated: its owner asks you to accept terms first.", "Accept them on the hub and set HF_TOKEN."
        ) from None
    except RepositoryNotFoundError:
        raise ModelUnavailable(f"The hub has no model {repo_id}.", "Check the spelling.") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise ModelUnavailable(
            f"{repo_id} is not in the cache and the hub is switched off or does not answer.",
            "Use the embedded encoder, or a local folder.",
        ) from None
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise ModelUnavailable(
            f"{repo_id} cannot be downloaded: {type(error).__name__}.", "Check the network, or give a local folder."
        ) from None
    tick(1, 1)
    return Path(folder)
