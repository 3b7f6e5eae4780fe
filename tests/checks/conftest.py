"""A training without engines for the tests beside this file."""

from tests.training import training_with as training_with
