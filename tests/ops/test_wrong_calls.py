"""Wrong calls of every operator: none ends the process, none passes, and the message names operator and argument."""

import pytest
from wrong_calls import calls, complaint, outcomes, wrong_calls


@pytest.mark.thorough
@pytest.mark.library
@pytest.mark.parametrize("op", sorted(calls()))
def test_wrong_calls_are_refused(op):
    found = zip(wrong_calls(op), outcomes(op), strict=True)
    bad = {f"{w.argument} {w.what}": why for w, messages in found if (why := complaint(w, messages))}
    assert not bad, "\n" + "\n".join(f"{call}: {why}" for call, why in bad.items())
