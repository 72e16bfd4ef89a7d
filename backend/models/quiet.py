"""Silence around the loading of models: no progress bars, no advice for programmers on the console.

Our own sentences say what a person must know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Switch progress bars and warnings of transformers off for the block. Used under the load lock only."""
    logging = cast(Any, transformers_logging)  # its functions carry no types
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
