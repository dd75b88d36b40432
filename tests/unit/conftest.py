import pytest

from elias.config import ResolvedRerank
from rerank_problem import Problem, fit_reranker, make_points


@pytest.fixture(scope="session")
def problem():
    return Problem(
        make_points(300, seed=0), make_points(100, seed=1), ResolvedRerank(enabled=True, trees=4)
    )


@pytest.fixture(scope="session")
def reranker(problem):
    return fit_reranker(problem.train, problem.config, problem.validation)
