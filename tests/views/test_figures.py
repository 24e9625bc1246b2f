"""What every picture shares."""

import numpy as np
import pytest

from jaxattn.analysis import stats
from jaxattn.views import figures


def test_relative_attention_counts_what_is_allowed_not_what_is_used():
    relative = figures.relative_attention(np.eye(4), np.tri(4, dtype=bool))
    np.testing.assert_array_equal(np.diag(relative), [1, 2, 3, 4])
    assert relative[3, 0] == 0
    assert np.isnan(relative[0, 3])


def test_band_is_student_s_at_each_point():
    curves = np.random.default_rng(0).normal(size=(5, 3))
    curves[4, 1] = np.nan
    band = figures.band(curves)
    for point in range(3):
        estimate = stats.estimate(curves[:4, point])
        assert band.middle[point] == pytest.approx(estimate.mean)
        assert (band.low[point], band.high[point]) == pytest.approx(estimate.ci95)
