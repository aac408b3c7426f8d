"""All cases."""

from __future__ import annotations

from tests.torchserve_cases.case import Case
from tests.torchserve_cases.project_cases import PROJECT_CASES
from tests.torchserve_cases.python_cases import PYTHON_CASES
from tests.torchserve_cases.report_cases import REPORT_CASES
from tests.torchserve_cases.value_cases import GIVEN_CASES, RETURN_CASES

CASES: tuple[Case, ...] = (*PYTHON_CASES, *GIVEN_CASES, *RETURN_CASES, *PROJECT_CASES, *REPORT_CASES)
