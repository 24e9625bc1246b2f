"""Distances to the exact posterior against NumPy, and what each of them cannot see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxattn.measures import posterior
from jaxattn.theory import losses


class Measures(NamedTuple):
    """Of each position."""

    kl: jax.Array
    total_variation: jax.Array
    entropy: jax.Array
    entropy_error: jax.Array


@jax.jit
@jax.vmap
def measure(log_bayes, logit):
    """All of them (N, T) of (N, T, C)."""
    return Measures(
        posterior.kl(log_bayes, logit),
        posterior.total_variation(log_bayes, logit),
        posterior.entropy(logit),
        posterior.entropy_error(log_bayes, logit),
    )


averaged_entropy_error = jax.jit(posterior.averaged_entropy_error)
calibration = jax.jit(posterior.calibration, static_argnames="bins")


@pytest.fixture
def case(x64):
    """Three sequences of a model and of Bayes, which rules classes out."""
    rng = np.random.default_rng(0)
    logit = 2 * rng.normal(size=(3, 7, 5))
    log_bayes = 3 * rng.normal(size=(3, 7, 5))
    log_bayes[0, 2, 1:4] = log_bayes[1, 0, 1:] = -np.inf
    return jnp.array(special.log_softmax(log_bayes, axis=2)), jnp.array(logit)


def probabilities(log_bayes, logit):
    return np.exp(np.asarray(log_bayes)), special.softmax(np.asarray(logit), axis=2)


def predictives(*positions):
    """One sequence (1, T, C) of probabilities."""
    with np.errstate(divide="ignore"):
        return jnp.array(np.log([positions]))


def test_each_position_by_hand(case):
    beta, p = probabilities(*case)
    found = measure(*case)
    of_model = stats.entropy(p, base=2, axis=2)
    of_bayes = stats.entropy(beta, base=2, axis=2)
    kl = stats.entropy(beta, p, base=2, axis=2)
    distance = np.abs(beta - p).sum(axis=2) / 2
    expected = Measures(kl, distance, of_model, np.abs(of_model - of_bayes))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-14)
    of_bayes_found = measure(case[0], case[0]).entropy
    np.testing.assert_allclose(of_bayes_found, of_bayes, atol=1e-14)


def test_bits(x64):
    bayes = predictives([0.5, 0.5, 0, 0], [0.25] * 4, [0.25] * 4)
    model = predictives([0.25] * 4, [0.5, 0.5, 0, 0], [0.25] * 4)
    found = measure(bayes, model)
    # The second rules out what may be.
    np.testing.assert_allclose(found.kl[0], [1, np.inf, 0], atol=1e-15)
    np.testing.assert_allclose(found.total_variation[0], [0.5, 0.5, 0])
    np.testing.assert_allclose(found.entropy[0], [2, 1, 2])
    np.testing.assert_allclose(found.entropy_error[0], [1, 1, 0], atol=1e-15)


def test_its_mean_is_the_distance_to_bayes_of_losses(case):
    expected = jax.jit(jax.vmap(losses.kl_to_bayes))(*case) / np.log(2)
    np.testing.assert_allclose(measure(*case).kl.mean(axis=1), expected)


def test_entropy_does_not_see_a_permuted_posterior(x64):
    bayes, model = [0.7, 0.2, 0.1, 0], [0.1, 0.2, 0.7, 0]
    found = measure(predictives(bayes, bayes, bayes), predictives(model, model, bayes))
    np.testing.assert_allclose(found.entropy_error, 0, atol=1e-15)
    np.testing.assert_allclose(found.total_variation[0], [0.6, 0.6, 0], atol=1e-15)
    kl = 0.6 * np.log2(7)
    np.testing.assert_allclose(found.kl[0], [kl, kl, 0], atol=1e-15)


def test_averaged_entropy_does_not_see_errors_of_opposite_sign(x64):
    sure, coin = predictives([1, 0]), predictives([0.5, 0.5])
    bayes, model = jnp.concatenate([sure, coin]), jnp.concatenate([coin, sure])
    np.testing.assert_allclose(averaged_entropy_error(bayes, model), 0, atol=1e-15)
    np.testing.assert_allclose(measure(bayes, model).entropy_error, 1)


def test_averaged_entropy_by_hand(case):
    beta, p = (stats.entropy(x, base=2, axis=2) for x in probabilities(*case))
    found = averaged_entropy_error(*case)
    np.testing.assert_allclose(found, np.abs(p.mean(0) - beta.mean(0)), atol=1e-14)
    of_each = measure(*case).entropy_error.mean(axis=0)
    assert (found <= of_each).all()
    assert (found < 0.9 * of_each).any()


def test_impossible_evidence_is_not_hidden(case):
    log_bayes, logit = case
    log_bayes = log_bayes.at[1, 3].set(jnp.nan)
    at = np.zeros((3, 7), bool)
    at[1, 3] = True
    found = measure(log_bayes, logit)
    for which in (found.kl, found.total_variation, found.entropy_error):
        np.testing.assert_array_equal(np.isnan(which), at)
    own = measure(log_bayes, log_bayes).entropy
    np.testing.assert_array_equal(np.isnan(own), at)
    averaged = averaged_entropy_error(log_bayes, logit)
    np.testing.assert_array_equal(np.isnan(averaged), at[1])
    for weight in (np.ones((3, 7)), 1.0 - at):
        found = calibration(log_bayes, logit, jnp.array(weight), bins=6)
        assert np.isnan(found.error)
        assert (np.isnan(found.exact) & ~np.isnan(found.predicted)).any()


def test_a_diverged_model_is_not_calibrated(case):
    log_bayes, logit = case
    lost = logit.at[2, 3].set(jnp.nan)
    for weight in (jnp.ones((3, 7)), jnp.zeros((3, 7)).at[0].set(1)):
        assert np.isnan(calibration(log_bayes, lost, weight, bins=6).error)


def binned(beta, p, weight, bins):
    """Pair by pair: predicted, exact and share of each bin, and the error."""
    pairs = [[] for _ in range(bins)]
    for (n, t, c), one in np.ndenumerate(p):
        pairs[min(int(one * bins), bins - 1)].append((weight[n, t], one, beta[n, t, c]))
    total = weight.sum() * p.shape[2]
    rows, error = [], 0.0
    for some in pairs:
        w, one, other = np.array(some).reshape(-1, 3).T
        if w.sum() == 0:
            rows.append((np.nan, np.nan, 0))
            continue
        mean, exact = np.average(one, weights=w), np.average(other, weights=w)
        rows.append((mean, exact, w.sum() / total))
        error += w.sum() / total * abs(mean - exact)
    return np.array(rows).T, error


@pytest.mark.parametrize("bins", [1, 6, 50])
def test_calibration_pair_by_pair(case, bins):
    beta, p = probabilities(*case)
    weight = np.random.default_rng(1).random((3, 7))
    weight[1:, 4] = 0
    found = calibration(*case, jnp.array(weight), bins=bins)
    rows, error = binned(beta, p, weight, bins)
    np.testing.assert_allclose(np.stack(found[:3]), rows, atol=1e-14)
    np.testing.assert_allclose(found.error, error, atol=1e-14)
    np.testing.assert_allclose(found.share.sum(), 1)
    assert np.isnan(found.predicted).any() == (bins == 50)  # some are empty
    distance = np.average(measure(*case).total_variation, weights=weight)
    assert error <= 2 / 5 * distance


def test_calibration_of_a_model_that_knows_nothing(x64):
    """Each class is as often right as the model says; which, it cannot tell."""
    bayes, model = predictives(*np.eye(4)), predictives(*np.full((4, 4), 0.25))
    found = calibration(bayes, model, jnp.ones((1, 4)), bins=10)
    np.testing.assert_allclose(found.error, 0, atol=1e-15)
    np.testing.assert_array_equal(found.share, np.arange(10) == 2)
    np.testing.assert_allclose(found.exact[2], 0.25)
    np.testing.assert_allclose(measure(bayes, model).kl, 2)


def test_calibration_of_a_model_that_is_too_sure(x64):
    """The model says 1 and 0 where Bayes says 3/4 and 1/4."""
    bayes, model = predictives([0.75, 0.25], [0.25, 0.75]), predictives([1, 0], [0, 1])
    found = calibration(bayes, model, jnp.array([[2.0, 1.0]]), bins=5)
    np.testing.assert_array_equal(found.share, [0.5, 0, 0, 0, 0.5])
    np.testing.assert_array_equal(found.predicted, [0, np.nan, np.nan, np.nan, 1])
    np.testing.assert_allclose(found.exact[np.array([0, 4])], [0.25, 0.75])
    np.testing.assert_allclose(found.error, 0.25)
    nothing = calibration(bayes, model, jnp.zeros((1, 2)), bins=5)
    assert np.isnan(nothing.predicted).all()
    assert (nothing.share == 0).all()
    assert nothing.error == 0


def test_bounds_on_many(x64):
    """Models from next to Bayes to far from it."""
    rng = np.random.default_rng(3)
    bayes = 4 * rng.normal(size=(1000, 8, 6))
    gap = 10 ** rng.uniform(-6, 1, size=(1000, 8, 1))
    logit = bayes + gap * rng.normal(size=bayes.shape)
    bayes[(bayes < -5) & (np.arange(6) > 0)] = -np.inf
    log_bayes = special.log_softmax(bayes, axis=2)
    found = measure(jnp.array(log_bayes), jnp.array(logit))
    kl, distance, entropy, error = (np.asarray(x) for x in found)
    assert kl.min() > -1e-14
    pinsker = np.sqrt(np.maximum(kl, 0) * np.log(2) / 2)
    assert (distance <= pinsker + 1e-8).all()
    assert distance.min() >= 0
    assert distance.max() <= 1
    assert (distance < 1e-5).any()
    assert (distance > 0.9).any()
    assert (distance > 0.9 * pinsker).any()  # so that a factor would show
    assert entropy.min() >= 0
    assert entropy.max() <= np.log2(6) + 1e-12
    # Fannes and Audenaert: near in total variation is near in entropy.
    own = stats.entropy(np.stack([distance, 1 - distance]), base=2)
    assert (error <= distance * np.log2(5) + own + 1e-12).all()


def test_float32_is_near(case):
    """At 10⁻⁴ bits, the size of the companion paper's errors, 1 % is to be seen."""
    log_bayes = np.asarray(case[0])
    noise = np.random.default_rng(2).normal(size=log_bayes.shape)
    arrays = jnp.array(log_bayes), jnp.array(log_bayes + 0.02 * noise)
    short = [x.astype(jnp.float32) for x in arrays]
    weight = jnp.ones((3, 7))
    near = calibration(*short, weight.astype(jnp.float32), bins=6)
    exact = calibration(*arrays, weight, bins=6)
    pairs = [*zip(measure(*short), measure(*arrays), strict=True)]
    for one, other in [*pairs, (near.error, exact.error)]:
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused(case):
    log_bayes, logit = case
    two = (posterior.kl, posterior.total_variation, posterior.entropy_error)
    for function in two:
        for wrong in (logit[0, :-1], logit[0, :, :-1], logit):
            with pytest.raises(AssertionError):
                function(log_bayes[0], wrong)
    for wrong in (logit[0, 0], logit):
        with pytest.raises(AssertionError):
            posterior.entropy(wrong)
    for wrong in (logit[0], logit[:2]):
        with pytest.raises(AssertionError):
            posterior.averaged_entropy_error(log_bayes, wrong)
        with pytest.raises(AssertionError):
            posterior.calibration(log_bayes, wrong, jnp.ones((3, 7)), 4)
    with pytest.raises(AssertionError):
        posterior.calibration(log_bayes, logit, jnp.ones(7), 4)
    with pytest.raises(ValueError, match=r"^bins=0: must be 1 or more"):
        posterior.calibration(log_bayes, logit, jnp.ones((3, 7)), 0)
