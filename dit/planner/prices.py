"""What an hour of a device costs: as given, else what was asked for it somewhere, with the place and the date.

Rents differ between providers by a factor of three and fall from year to year (H100: 1.99 to 5.00 dollars in May 2026,
mercatus-ai.com/blog/cloud-gpu-pricing), so every figure here is an assumption to be replaced by ``--price``.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dit.config import UsageError
from dit.planner.catalogue import Device
from dit.planner.hardware import find_device

_RUNPOD = "RunPod's list as printed on 2026-03-10 by deploybase.ai/articles/runpod-gpu-pricing, the lower column"
_LAMBDA = "assumption: about what Lambda's price list said in 2025; no page kept"
_GUESS = "assumption: a common rent in 2025; no page kept"
PRICES: dict[str, tuple[float, str]] = {
    "RTX-3090": (0.22, _RUNPOD), "RTX-4090": (0.34, _RUNPOD), "RTX-5090": (0.69, _RUNPOD), "L4": (0.44, _RUNPOD),
    "L40S": (0.79, _RUNPOD), "A100-PCIe": (1.19, _RUNPOD), "A100-80GB": (1.39, _RUNPOD), "H100-PCIe": (1.99, _RUNPOD),
    "H100": (2.69, _RUNPOD + "; the same on 2026-05-22, spheron.network/blog/runpod-h100-pricing-2026"),
    "H200": (3.59, _RUNPOD), "B200": (5.98, _RUNPOD), "A10": (0.75, _LAMBDA), "A100-40GB": (1.29, _LAMBDA),
    "A100-40GB-PCIe": (1.29, _LAMBDA), "V100-16GB": (0.55, _LAMBDA), "V100": (0.6, _GUESS), "T4": (0.35, _GUESS),
    "V100-PCIe-16": (0.5, _GUESS), "V100-PCIe": (0.55, _GUESS), "RTX-6000-Ada": (0.8, _GUESS),
    "H100-NVL": (2.6, _GUESS), "MI300X": (2.5, _GUESS)}
"""Dollars for an hour of one device, rented on demand, by an alias of the catalogue, and where the figure is from."""


@dataclass(frozen=True)
class Price:
    """Per device-hour, in whatever currency it was given; the catalogue's are dollars."""

    per_hour: float
    source: str


def price_of(device: Device, given: Mapping[str, float]) -> Price | None:
    """As given by catalogue name, else the assumption for one of its aliases, else None."""
    if device.name in given:
        return Price(given[device.name], "given")
    assumed = _by_device().get(device.name)
    return Price(*assumed) if assumed else None


@functools.cache
def _by_device() -> dict[str, tuple[float, str]]:
    return {find_device(alias).name: price for alias, price in PRICES.items()}


def given_prices(texts: Sequence[str], for_all: float | None, devices: Sequence[Device]) -> dict[str, float]:
    """Prices by catalogue name: ``for_all`` for every device, and over it ``texts`` such as "H100=2.5".

    Raises UsageError for what is no price, and for a price of a device that is not looked at.
    """
    prices = {} if for_all is None else dict.fromkeys((device.name for device in devices), for_all)
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not equals or not name or not 0 < price < math.inf:
            raise UsageError(f"--price {text}: must be a device and a number above 0, for example H100=2.5")
        try:
            device = find_device(name)
        except UsageError as error:
            raise UsageError(str(error).replace("--device", "--price", 1).split("; or describe", 1)[0]) from None
        if device.name not in {each.name for each in devices}:
            named = ", ".join(each.name for each in devices)
            raise UsageError(f"--price {text} has no effect: {device.name} is not among the devices ({named})")
        prices[device.name] = price
    return prices


def check_prices(devices: Sequence[Device], given: Mapping[str, float], needs_price: bool) -> None:
    """Raise UsageError where only some devices have a price, or none where one is needed: dollars and device-hours
    cannot be compared.
    """
    unknown = [device.name for device in devices if price_of(device, given) is None]
    if unknown and (needs_price or len(unknown) < len(devices)):
        raise UsageError(f"no price is known for {unknown[0]}; say it with --price \"{unknown[0]}=1.50\" (one device, "
                         "one hour)")
