"""Files with AT2's weights per layer and head: which model they belong to, where they lie, how they were made.

A file serves only the model that it was fitted to: id, revision and vocabulary must be the same. One comes with the
app; others lie in the cache folder, where training writes them. Plain JSON of a few kilobytes. Knows no models beyond
their names and shapes, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.errors import NotApplicable
from backend.settings import get_settings

if TYPE_CHECKING:
    from backend.models.language import LanguageModel

SHIPPED = Path(__file__).parents[2] / "assets" / "at2"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file of weights is bound to.

    Attributes:
        model: Id of the model, as requested.
        revision: Commit or content hash of its weights.
        tokenizer: Hash of its vocabulary.
    """

    model: str
    revision: str
    tokenizer: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache folder: readable, and different for every identity."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return f"{_slug(self.model)}-{digest}.json"


@dataclass(frozen=True, slots=True)
class Record:
    """How weights came about.

    Attributes:
        prompts: Texts that were fitted.
        held_out: Texts that were kept aside.
        masks: Random ablations per text.
        keep: Probability that a token stays.
        steps: Steps of the fit.
        correlation: Mean correlation of predicted and measured scores over the ablations of a text, held-out texts.
        equal_weights: The same for equal weights, that is for plain mean attention.
        random_weights: The same for random weights, averaged over draws.
        by_kind: Correlation per kind of text.
        data: What the texts are, in words.
        seed: Of everything random.
        versions: Of the packages.
        created: Date.
    """

    prompts: int
    held_out: int
    masks: int
    keep: float
    steps: int
    correlation: float
    equal_weights: float
    random_weights: float
    by_kind: Mapping[str, float] = field(default_factory=dict)
    data: str = ""
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Weights and where they come from.

    Attributes:
        identity: The model that they belong to.
        theta: One row per layer, one number per head; absolute values sum to 1.
        record: How they came about.
    """

    identity: Identity
    theta: tuple[tuple[float, ...], ...]
    record: Record


def identity_of(model: LanguageModel) -> Identity:
    """Return what weights for this model must be bound to."""
    vocabulary = sorted(model.tokenizer.get_vocab().items()) if model.tokenizer is not None else []
    digest = hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()[:16]
    return Identity(model.info.id, model.info.revision, digest)


def find(model: LanguageModel) -> Fitted:
    """Return the weights that were fitted to this model.

    Raises:
        NotApplicable: If there are none, with the command that makes them, or the file is damaged.
    """
    wanted = identity_of(model)
    other = False
    for path in (SHIPPED / f"{_slug(wanted.model)}.json", cached_path(wanted)):
        if not path.is_file():
            continue
        fitted = read(path)
        if fitted.identity == wanted:
            return fitted
        other = True
    what = (
        "The weights of AT2 for this model belong to another version of it."
        if other
        else "AT2 needs weights that are learned once per model, and nobody has learned them for this one."
    )
    raise NotApplicable(what, f"Train them: python -m scripts.train_at2 --model {wanted.model}")


def cached_path(identity: Identity) -> Path:
    """Return where weights for this model lie in the cache folder."""
    return get_settings().cache_dir / "at2" / identity.file_name


def write(fitted: Fitted, path: Path) -> None:
    """Write weights, rounded to six digits behind the point, in one step."""
    theta = [[round(value, 6) for value in row] for row in fitted.theta]
    content = {
        "format": FORMAT,
        **asdict(fitted.identity),
        "theta": theta,
        "record": asdict(fitted.record),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def read(path: Path) -> Fitted:
    """Read weights; what was read before is not read again unless the file changed.

    Raises:
        NotApplicable: If the file is damaged or of another version.
    """
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: Path, size: int, mtime: int) -> Fitted:
    del size, mtime  # part of the key: a file that was written anew is read again
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError("another format")
        theta = tuple(tuple(float(value) for value in row) for row in found["theta"])
        if (
            not theta
            or len({len(row) for row in theta}) != 1
            or not all(math.isfinite(v) for row in theta for v in row)
        ):
            raise ValueError("not a matrix of numbers")
        identity = Identity(str(found["model"]), str(found["revision"]), str(found["tokenizer"]))
        return Fitted(identity, theta, Record(**found["record"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotApplicable(
            f"The file {path.name} with weights of AT2 is damaged ({type(error).__name__}).",
            "Delete it, or train it again: python -m scripts.train_at2",
        ) from error


def _slug(model: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[-60:]
