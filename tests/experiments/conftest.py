"""Fixtures that tests of the experiments share with those of the example."""

from tests.examples.conftest import standard_promotion as standard_promotion
