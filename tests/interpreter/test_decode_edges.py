"""`tests/test_decode_edges.py` under the Triton interpreter."""

from tests.test_decode_edges import (  # noqa: F401  (collected here)
    test_a_row_without_low_keys,
    test_low_keys_of_every_format,
    test_many_rows,
    test_nan_is_not_lost,
    test_nan_of_a_key_that_weighs_nothing,
    test_padding_cannot_harm,
    test_scores_that_grow,
    test_what_a_window_hides_cannot_harm,
)
