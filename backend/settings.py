"""Limits and switches, read once from ``ATTRISCOPE_*`` environment variables into a frozen object."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """All settings. The description of each field is its line in the README's table."""

    model_config = SettingsConfigDict(env_prefix="ATTRISCOPE_", frozen=True, extra="ignore")

    device: str = Field("auto", description='"auto" (CUDA, else MPS, else CPU), "cpu", "cuda", "cuda:1", "mps"')
    dtype: str = Field("auto", description='"auto" (bfloat16 on CUDA, else float32), "float32", "bfloat16", "float16"')
    memory_budget_gb: float = Field(
        8.0, gt=0, description="models held at once, in GB; the least recently used goes first"
    )
    cache_dir: Path = Field(
        Path.home() / ".cache" / "attriscope", description="converted models, downloaded models and stored results"
    )
    store_limit_mb: int = Field(1024, ge=16, description="size bound of the result store, in MB")
    queue_limit: int = Field(16, ge=1, description="jobs that may wait per device; one more is refused")
    job_time_limit_s: float = Field(1800.0, gt=0, description="a job is stopped after this many seconds")
    max_prompt_chars: int = Field(50_000, ge=1, le=200_000, description="longest prompt, in characters")
    max_prompt_tokens: int = Field(
        4096, ge=1, description="longest prompt, in tokens (the model's context may be shorter)"
    )
    max_upload_mb: int = Field(10, ge=1, description="largest uploaded file, in MB")
    offline: bool = Field(False, description="never contact a model hub; use local files and what is cached")
    hub_endpoint: str = Field("https://huggingface.co", description="address of the model hub")
    hub_timeout_s: float = Field(8.0, gt=0, le=60, description="seconds to wait for the hub's first answer")
    warm_up: bool = Field(True, description="import libraries and load the embedded model when the first page opens")
    auto_run_s: float = Field(15.0, ge=0, description="runs estimated below this start at once; longer ones ask first")

    @property
    def memory_budget_bytes(self) -> int:
        """The model budget in bytes."""
        return int(self.memory_budget_gb * 1e9)


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the process-wide settings, read from the environment at the first call."""
    return Settings()
