"""Every claim holds on its check and survives its falsifier."""

import math

import pytest
from claims import CLAIMS


@pytest.mark.parametrize("name", CLAIMS)
def test_claim_holds_on_its_independent_check(name: str) -> None:
    claim = CLAIMS[name]()
    assert claim.faults == []
    assert claim.holds
    assert claim.statement
    assert claim.source
    assert not any(math.isnan(value) for value in claim.figures.values())
    assert claim.name in str(claim)


@pytest.mark.parametrize("name", [name for name in CLAIMS if "," not in name])
def test_falsifier_fails_to_break_it_in_10000_cases(name: str) -> None:
    assert CLAIMS[name]().falsify(10_000, seed=1) is None


@pytest.mark.parametrize("name", [name for name in CLAIMS if "," in name])
def test_falsifier_fails_to_break_the_variants(name: str) -> None:
    assert CLAIMS[name]().falsify(2_000, seed=2) is None
