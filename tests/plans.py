"""Random points of a search space, under the name by which tests know them."""

from autopar.testing.plans import Wanted, random_assignment

__all__ = ["Wanted", "random_assignment"]
