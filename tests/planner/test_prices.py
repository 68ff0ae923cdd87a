"""Prices: as given, else an assumption that says where it is from; dollars and device-hours are never mixed."""

import pytest

from dit.config import UsageError
from dit.planner.catalogue import CATALOGUE
from dit.planner.hardware import find_device
from dit.planner.prices import PRICES, check_prices, given_prices, price_of

H100, A100, GB200 = map(find_device, ("H100", "A100-SXM4-80GB", "GB200"))


def test_every_assumption_is_of_a_catalogue_device_and_says_where_it_is_from():
    for alias, (dollars, source) in PRICES.items():
        assert find_device(alias) in CATALOGUE and 0.1 < dollars < 20
        assert "20" in source and ("assumption" in source or ".com" in source or ".ai" in source)
    names = [find_device(alias).name for alias in PRICES]
    assert len(set(names)) == len(names), "one price for a device"


def test_faster_members_of_a_family_are_not_cheaper():
    for slower, faster in (("A100-PCIe", "A100-80GB"), ("A100-80GB", "H100"), ("H100", "H200"), ("H200", "B200"),
                           ("RTX-3090", "RTX-4090"), ("RTX-4090", "RTX-5090"), ("H100-PCIe", "H100")):
        assert PRICES[slower][0] < PRICES[faster][0]


def test_given_prices_win():
    prices = given_prices(["H100=2.5"], 1.5, [H100, A100])
    assert prices == {H100.name: 2.5, A100.name: 1.5}
    assert price_of(H100, prices).per_hour == 2.5 and price_of(H100, prices).source == "given"
    assert given_prices(["a100-80gb=0.9"], None, [H100, A100]) == {A100.name: 0.9}
    assert price_of(A100, {}).per_hour == PRICES["A100-80GB"][0] and "2026" in price_of(A100, {}).source
    assert price_of(GB200, {}) is None


@pytest.mark.parametrize("text, said", [
    ("H100", "must be a device and a number above 0, for example H100=2.5"),
    ("H100=", "must be a device and a number above 0"), ("=2.5", "must be a device and a number above 0"),
    ("H100=free", "must be a device and a number above 0"), ("H100=0", "must be a device and a number above 0"),
    ("H100=-1", "must be a device and a number above 0"), ("H100=nan", "must be a device and a number above 0"),
    ("H100=inf", "must be a device and a number above 0"), ("H1000=2", "--price H1000: unknown; nearest"),
    ("T4=0.3", "has no effect: Tesla T4 is not among the devices"),
])
def test_what_is_no_price_is_refused_in_one_line(text, said):
    with pytest.raises(UsageError) as error:
        given_prices([text], None, [H100, A100])
    assert str(error.value).startswith("--price ") and said in str(error.value) and "\n" not in str(error.value)


def test_dollars_and_device_hours_are_not_compared():
    check_prices([H100, A100], {}, needs_price=True)
    check_prices([GB200], {}, needs_price=False)
    check_prices([GB200, H100], {GB200.name: 8.0}, needs_price=True)
    for devices, needs in (([GB200, H100], False), ([GB200], True)):
        with pytest.raises(UsageError, match="no price is known for NVIDIA GB200; say it with --price"):
            check_prices(devices, {}, needs_price=needs)
