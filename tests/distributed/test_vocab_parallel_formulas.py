"""The reference formulas of losses whose classes are split over processes."""

import pytest
import vocab_parallel_formula_cases as cases
from process_group import run_case


@pytest.mark.parametrize("case", cases.CASES.parameters())
def test_every_rank_computes_the_results_of_all_classes(case):
    run_case(case, cases, 3)
