"""Why a GPU's clocks are below their maximum: NVML's bits, their names, and what each speaks of."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from ddp_bench.bench.gpus import ask_nvml


class ClockReason(StrEnum):
    """Why a GPU's clocks are not at their maximum: NVML's "clocks event reasons"."""

    IDLE = "idle"
    APPLICATION = "application clocks"
    POWER_CAP = "power cap"
    HARDWARE = "hardware slow-down"
    SYNC_BOOST = "sync boost"
    SOFTWARE_HEAT = "software thermal slow-down"
    HARDWARE_HEAT = "hardware thermal slow-down"
    POWER_BRAKE = "power brake"
    DISPLAY = "display clocks"


REASONS = {
    0x001: ClockReason.IDLE,
    0x002: ClockReason.APPLICATION,
    0x004: ClockReason.POWER_CAP,
    0x008: ClockReason.HARDWARE,
    0x010: ClockReason.SYNC_BOOST,
    0x020: ClockReason.SOFTWARE_HEAT,
    0x040: ClockReason.HARDWARE_HEAT,
    0x080: ClockReason.POWER_BRAKE,
    0x100: ClockReason.DISPLAY,
}
"""Bits of "nvmlClocksEventReasons" in nvml.h; their names in the binding have changed, the bits have not."""

FAULTS = frozenset(
    (ClockReason.HARDWARE, ClockReason.SOFTWARE_HEAT, ClockReason.HARDWARE_HEAT, ClockReason.POWER_BRAKE)
)
"""Reasons that NVML documents as heat or power delivery, not choice ("nvmlClocksEventReasons")."""

CHOICES = frozenset((ClockReason.APPLICATION, ClockReason.SYNC_BOOST, ClockReason.DISPLAY))
"""Reasons that someone set, again by NVML's documentation."""

THROTTLING = FAULTS | {ClockReason.POWER_CAP}
"""Reasons that heat and power bring about under load: neither idle nor set by someone."""


def clock_reasons(handle: Any) -> frozenset[ClockReason] | None:
    """What holds down the clocks of a GPU now; None where it does not say."""
    bits = ask_nvml(
        "nvmlDeviceGetCurrentClocksEventReasons|nvmlDeviceGetCurrentClocksThrottleReasons", handle
    )
    return None if bits is None else frozenset(why for bit, why in REASONS.items() if bits & bit)
