"""Device and number format: what is chosen, why, and what is refused."""

import pytest
import torch

from backend.errors import BadRequest
from backend.models.placement import choose_placement, free_bytes, is_out_of_memory, weight_bytes
from backend.settings import Settings
from backend.types import ModelRef


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have certain hardware."""

    def pretend(cuda=0, mps=False, bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(
    ("hardware", "device", "dtype"),
    [
        ({}, "cpu", "float32"),
        ({"cuda": 1}, "cuda:0", "bfloat16"),
        ({"cuda": 1, "bf16": False}, "cuda:0", "float32"),
        ({"mps": True}, "mps", "float32"),
        ({"cuda": 2, "mps": True}, "cuda:0", "bfloat16"),
    ],
)
def test_hardware_decides_when_nobody_asks(machine, hardware, device, dtype):
    machine(**hardware)
    placement = choose_placement(ModelRef(), Settings(device="auto"))
    assert (str(placement.device), placement.dtype_name) == (device, dtype)
    assert "is present" in placement.reason


def test_request_beats_settings_and_settings_beat_hardware(machine):
    machine(cuda=2)
    settings = Settings(device="cuda:1", dtype="float16")
    chosen = choose_placement(ModelRef(), settings)
    assert (str(chosen.device), chosen.dtype_name) == ("cuda:1", "float16")
    assert "ATTRISCOPE_DEVICE" in chosen.reason and "ATTRISCOPE_DTYPE" in chosen.reason
    chosen = choose_placement(ModelRef(device="cpu", dtype="bfloat16"), settings)
    assert (str(chosen.device), chosen.dtype_name) == ("cpu", "bfloat16")
    assert "request" in chosen.reason


@pytest.mark.parametrize(
    ("hardware", "ref", "words"),
    [
        ({}, ModelRef(device="cuda"), "no CUDA device"),
        ({}, ModelRef(device="mps"), "no Apple GPU"),
        ({"cuda": 1}, ModelRef(device="cuda:3"), "There is no device cuda:3"),
        ({}, ModelRef(device="tpu"), "kind of device named 'tpu'"),
        ({}, ModelRef(device="cpu:1"), "kind of device"),
        ({"cuda": 1}, ModelRef(device="cuda:-1"), "kind of device"),
        ({}, ModelRef(device=""), "kind of device"),
        ({}, ModelRef(dtype="float64"), "number format named 'float64'"),
    ],
)
def test_what_is_not_there_is_refused(machine, hardware, ref, words):
    machine(**hardware)
    with pytest.raises(BadRequest, match=words) as caught:
        choose_placement(ref, Settings(device="auto"))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_out_of_memory_is_recognized(error, expected):
    assert is_out_of_memory(error) is expected


def test_real_allocation_failure_is_recognized():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 50, dtype=torch.float32)
    assert is_out_of_memory(caught.value)


def test_sizes():
    assert weight_bytes(1000, torch.float32) == 4000
    assert weight_bytes(1000, torch.bfloat16) == 2000


def test_free_memory_shrinks_when_memory_is_used():
    before = free_bytes(torch.device("cpu"))
    block = torch.ones(100_000_000)  # 400 MB
    after = free_bytes(torch.device("cpu"))
    assert before is not None and after is not None
    assert 0 < after < before
    assert block.sum() > 0
