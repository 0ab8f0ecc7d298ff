"""`tests/test_append.py` under the Triton interpreter."""

from tests.test_append import (  # noqa: F401  (collected here)
    pytestmark,
    test_beyond_the_capacity,
    test_padding_and_odd_values,
    test_same_bits,
)
