"""Statistics over seeds: means with intervals, paired differences, censored times.

Intervals are at 95 %. What cannot be known from the seeds at hand (an interval from one
seed, a median beyond the end of the run) is None, never a number.
"""

import functools
from typing import NamedTuple

import numpy as np
from scipy import stats as scipy_stats

_AT_ONCE = 2**21  # numbers of a bootstrap's resamples: 16 MiB


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float | None
    std: float | None  # sample standard deviation, n - 1
    ci95: tuple[float, float] | None  # of the mean
    n: int


class Difference(NamedTuple):
    """A mean over pairs, with two intervals that err in different ways."""

    mean: float | None
    std: float | None  # sample standard deviation, n - 1
    ci95: tuple[float, float] | None  # Student's: right if differences are normal
    # BCa: no shape assumed, narrow for few; None where seeds hang together.
    bootstrap95: tuple[float, float] | None
    n: int


class Median(NamedTuple):
    """A median over seeds; None where it depends on a seed that was not seen.

    `beyond` says of the interval's low end, the median and the high end on which side
    of all that was seen they lie: "<", ">", "?" if that is not known, or "".
    """

    median: float | None
    ci95: tuple[float | None, float | None] | None
    n: int
    beyond: tuple[str, str, str] = ("", "", "")


def estimate(values: np.ndarray) -> Estimate:
    """Mean over seeds with Student's interval.

    mean ± t_{0.975, n-1} std / √n

    Args:
      values: one per seed (n,); non-finite ones are left out, and n says so.

    Returns:
      Estimate; std and ci95 are None below two values, all None without any.
    """
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    n = len(values)
    if n == 0:
        return Estimate(None, None, None, 0)
    mean = float(values.mean())
    if n == 1:
        return Estimate(mean, None, None, 1)
    std = float(values.std(ddof=1))
    half = float(scipy_stats.t.ppf(0.975, n - 1)) * std / np.sqrt(n)
    return Estimate(mean, std, (float(mean - half), float(mean + half)), n)


def paired_difference(values: np.ndarray, baseline: np.ndarray) -> Difference:
    """Mean of value - baseline over the seeds that have both.

    Args:
      values: one per seed (n,).
      baseline: of the same seeds (n,).

    Returns:
      Difference, see `estimate` and `bootstrap`.
    """
    differences = np.asarray(values, np.float64) - np.asarray(baseline, np.float64)
    mean, std, ci95, n = estimate(differences)
    return Difference(mean, std, ci95, bootstrap(differences), n)


def bootstrap(values: np.ndarray) -> tuple[float, float] | None:
    """Bootstrap interval of a mean over seeds, bias-corrected and accelerated (BCa).

    It covers the mean in 88 % of normal and 84 % of exponential samples of 8 seeds, and
    in 93 % of either of 32 (Student's: 95 % of the normal and 90 % of the exponential
    ones of 8), as simulated in tests/test_stats.py: believe a difference that both
    exclude from 0.

    Args:
      values: one per seed (n,); non-finite ones are left out.

    Returns:
      Its ends; None below two values; the extremes where they leave no choice. Always
      the same for the same values.

    Source: Efron 1987; scipy.stats.bootstrap.
    """
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    extremes = float(values.min()), float(values.max())
    # Equal but for rounding: resamples do not differ enough to correct a bias by.
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return extremes
    result = scipy_stats.bootstrap(
        (values,),
        np.mean,
        method="BCa",
        batch=max(1, _AT_ONCE // len(values)),  # resamples, or they fill the memory
        rng=np.random.default_rng(0),
    )
    found = tuple(float(end) for end in result.confidence_interval)
    return found if np.isfinite(found).all() else extremes


def sign(difference: Difference) -> int:
    """-1 or 1 where its intervals lie on that side of 0, else 0: not decided."""
    intervals = [i for i in (difference.ci95, difference.bootstrap95) if i is not None]
    if not intervals:
        return 0
    lows, highs = zip(*intervals, strict=True)
    return int(min(lows) > 0) - int(max(highs) < 0)


def cross_fitted(values: np.ndarray) -> Estimate:
    """Mean over seeds of scores, each at settings chosen on all the other seeds.

    mean ± t_{0.975, n-1} std √(1/n + 1/(n-1))

    Any two seeds share all but two of those that chose for them, so that their scores
    hang together. Simulated after the means and covariances of results/rates, with 8
    seeds, differences of these are covered in 93 to 98 % and by Student's own interval
    in 81 to 93 %; with 32 seeds in 89 to 97 and 75 to 89 %. Twenty points all nearly as
    good as each other are the worst found: 91 % with 8 seeds, 76 % with 32.

    Args:
      values: one per seed (n,), as for `estimate`.

    Returns:
      Estimate.

    Source: Nadeau and Bengio 2003, Inference for the generalization error.
    """
    mean, std, ci95, n = estimate(values)
    if ci95 is None:
        return Estimate(mean, std, None, n)
    half = (ci95[1] - mean) * float(np.sqrt(1 + n / (n - 1)))
    return Estimate(mean, std, (mean - half, mean + half), n)


def cross_fitted_difference(values: np.ndarray, baseline: np.ndarray) -> Difference:
    """Mean of value - baseline over the seeds that have both, see `cross_fitted`."""
    differences = np.asarray(values, np.float64) - np.asarray(baseline, np.float64)
    mean, std, ci95, n = cross_fitted(differences)
    return Difference(mean, std, ci95, None, n)


def first_reached(
    steps: np.ndarray, curves: np.ndarray, threshold: np.ndarray
) -> np.ndarray:
    """First evaluation after step 0 at which each seed is at or below its threshold.

    Args:
      steps: of the evaluations (E,), the first being 0.
      curves: (n, E), lower is better.
      threshold: (n,).

    Returns:
      (n,) float64; inf for a seed that did not get there within the run (censored),
      NaN for one whose threshold is not finite.
    """
    reached = np.asarray(curves)[:, 1:] <= np.asarray(threshold)[:, None]
    first = np.asarray(steps, np.float64)[1:][np.argmax(reached, axis=1)]
    first = np.where(reached.any(axis=1), first, np.inf)
    return np.where(np.isfinite(threshold), first, np.nan)


def settled(steps: np.ndarray, curves: np.ndarray, share: float) -> np.ndarray:
    """First evaluation from which on each seed is near to where it ends.

    The first with |x(t') - x(end)| ≤ (1 - share) (x(0) - x(end)) for all t' ≥ t.

    Args:
      steps: of the evaluations (E,), the first being 0.
      curves: x (n, E), such as a distance.
      share: of the way from the first to the last value, such as 0.9.

    Returns:
      (n,) float64; NaN for a seed that ended no lower than it began, or was not finite.
      The end is that of the run, whether or not the curve would have gone on.
    """
    curves = np.asarray(curves, np.float64)
    way = curves[:, :1] - curves[:, -1:]
    known = np.isfinite(curves).all(axis=1) & (way[:, 0] > 0)
    far = np.abs(curves - curves[:, -1:]) > (1 - share) * way
    # The one behind the last that is far; the end itself never is.
    last = curves.shape[1] - 1 - np.argmax(far[:, ::-1], axis=1)
    place = np.minimum(last + 1, curves.shape[1] - 1)
    return np.where(known, np.asarray(steps, np.float64)[place], np.nan)


def arrived(steps: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, ...]:
    """Share of seeds that have got there by each step: one less the survival curve.

    All are watched to the end of the run, so that the Kaplan-Meier estimate is the
    plain share, and pointwise a binomial proportion.

    Args:
      steps: (E,).
      times: one per seed (n,), inf if it never got there; NaN is left out.

    Returns:
      The share and the ends of its Wilson 95 % interval, each (E,); NaN without seeds.
    """
    times = np.asarray(times, np.float64)
    times = times[~np.isnan(times)]
    if len(times) == 0:
        return (np.full(len(steps), np.nan),) * 3
    counts = (times[:, None] <= np.asarray(steps)[None]).sum(axis=0)
    found = []
    for count in counts.tolist():
        test = scipy_stats.binomtest(count, len(times))
        found.append(test.proportion_ci(0.95, method="wilson"))
    low, high = np.array(found).T
    return counts / len(times), low, high


def median(values: np.ndarray) -> Median:
    """Median over seeds with the sign test's interval, right under censoring.

    Both use the order of the values alone, so a seed that never arrived (inf as a time,
    0 as a speed-up) counts as what it is: later, or slower, than any that did. The
    interval is a pair of order statistics and needs at least 6 seeds.

    Args:
      values: one per seed (n,), times or speed-ups; inf and 0 are censored; NaN is left
        out, and n says so.

    Returns:
      Median; an end of the interval is None where it is censored.

    Source: Conover 1999, Practical Nonparametric Statistics, section 3.2;
    scipy.stats.quantile_test.
    """
    values = np.asarray(values, np.float64)
    return _bracket(values[~np.isnan(values)], values[~np.isnan(values)])


def median_ratio(numerator: np.ndarray, denominator: np.ndarray) -> Median:
    """Median over seeds of a ratio of two times, either of which may be censored.

    Where both are, the ratio is anything. Such a seed is counted once as the least and
    once as the greatest, and what then differs is not known.

    Args:
      numerator: one per seed (n,), inf if censored; NaN is left out, and n says so.
      denominator: likewise.

    Returns:
      Median, see `median`.
    """
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    known = ~(np.isnan(numerator) | np.isnan(denominator))
    numerator, denominator = numerator[known], denominator[known]
    both = np.isinf(numerator) & np.isinf(denominator)
    ratio = numerator / np.where(both, 1, denominator)
    return _bracket(np.where(both, 0, ratio), np.where(both, np.inf, ratio))


def _bracket(least: np.ndarray, greatest: np.ndarray) -> Median:
    """Median and interval of values that lie somewhere between two, seed by seed."""
    least, greatest = np.sort(least), np.sort(greatest)
    n = len(least)
    if n == 0:
        return Median(None, None, 0, ("", "?", ""))
    middle = slice((n - 1) // 2, n // 2 + 1)
    centre, beyond = _seen([*least[middle], *greatest[middle]])
    ranks = _median_ranks(n)
    if ranks is None:
        return Median(centre, None, n, ("", beyond, ""))
    (low, below), (high, above) = _seen([least[ranks[0]]]), _seen([greatest[ranks[1]]])
    return Median(centre, (low, high), n, (below, beyond, above))


@functools.cache
def _median_ranks(n: int) -> tuple[int, int] | None:
    """Which of n sorted values are the ends of the interval; None for too few."""
    test = scipy_stats.quantile_test(np.arange(n), q=n / 2, p=0.5)
    ends = test.confidence_interval(0.95)
    return None if np.isnan(ends).any() else (int(ends.low), int(ends.high))


def _seen(values: list[float]) -> tuple[float | None, str]:
    """The middle of values, None if any is censored, and on which side it then lies."""
    if all(0 < value < np.inf for value in values):
        return (float(min(values)) + float(max(values))) / 2, ""
    if all(value == 0 for value in values):
        return None, "<"
    return None, ">" if all(value == np.inf for value in values) else "?"
