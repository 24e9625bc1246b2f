"""Losses against their definitions in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxattn.theory import losses

cross_entropy = jax.jit(losses.cross_entropy)
accuracy = jax.jit(losses.accuracy)
tied_accuracy = jax.jit(losses.tied_accuracy)
predictive_entropy = jax.jit(losses.predictive_entropy)
kl_to_bayes = jax.jit(losses.kl_to_bayes)
value_and_gradient = jax.jit(jax.value_and_grad(losses.cross_entropy))


@pytest.fixture
def case(x64):
    rng = np.random.default_rng(0)
    logit = 3 * rng.normal(size=(9, 5))
    weight = np.where(np.arange(9) % 3 == 0, 0, rng.random(9))
    return logit, rng.integers(0, 5, 9), weight


def test_cross_entropy(case):
    logit, target, weight = case
    nll = -special.log_softmax(logit, axis=1)[np.arange(9), target]
    assert cross_entropy(logit, target) == pytest.approx(nll.mean())
    weighted = np.average(nll, weights=weight)
    assert cross_entropy(logit, target, weight) == pytest.approx(weighted)


def test_scaling_the_weights_changes_nothing(case):
    logit, target, weight = case
    once = cross_entropy(logit, target, weight)
    assert cross_entropy(logit, target, 7 * weight) == pytest.approx(once)


def test_all_weights_zero_is_zero_not_nan(case):
    logit, target, weight = case
    loss, gradient = value_and_gradient(logit, target, 0 * weight)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)


def test_predictive_entropy(case):
    logit, _, weight = case
    entropy = stats.entropy(special.softmax(logit, axis=1), axis=1)
    assert predictive_entropy(logit) == pytest.approx(entropy.mean())
    weighted = np.average(entropy, weights=weight)
    assert predictive_entropy(logit, weight) == pytest.approx(weighted)


def test_predictive_entropy_of_the_extremes_and_its_gradient(x64):
    assert predictive_entropy(jnp.zeros((2, 8))) == pytest.approx(np.log(8))
    ruled_out = jnp.array([[0.0, -jnp.inf, -jnp.inf]])
    value, gradient = jax.jit(jax.value_and_grad(losses.predictive_entropy))(ruled_out)
    assert value == 0
    assert np.isfinite(gradient).all()


def test_kl_to_bayes(case):
    logit, _, weight = case
    log_bayes = special.log_softmax(
        np.random.default_rng(1).normal(size=(9, 5)), axis=1
    )
    model = special.softmax(logit, axis=1)
    kl = stats.entropy(np.exp(log_bayes), model, axis=1)
    log_bayes = jnp.asarray(log_bayes)
    assert kl_to_bayes(log_bayes, logit) == pytest.approx(kl.mean())
    weighted = np.average(kl, weights=weight)
    assert kl_to_bayes(log_bayes, logit, weight) == pytest.approx(weighted)
    same = kl_to_bayes(jax.nn.log_softmax(logit), logit)
    assert same == pytest.approx(0, abs=1e-15)


def test_kl_where_bayes_excludes_classes(x64):
    log_bayes = jnp.array([[0.0, -jnp.inf]])
    logit = jnp.zeros((1, 2))
    value, gradient = jax.jit(jax.value_and_grad(losses.kl_to_bayes, 1))(
        log_bayes, logit
    )
    assert value == pytest.approx(np.log(2))
    assert np.isfinite(gradient).all()


def test_kl_does_not_hide_flagged_evidence(x64):
    log_bayes = jnp.full((1, 2), jnp.nan)
    assert np.isnan(kl_to_bayes(log_bayes, jnp.zeros((1, 2))))


def test_accuracy(case):
    logit, target, weight = case
    hit = np.argmax(logit, axis=1) == target
    assert accuracy(logit, target) == pytest.approx(hit.mean())
    weighted = np.average(hit, weights=weight)
    assert accuracy(logit, target, weight) == pytest.approx(weighted)


def test_accuracy_of_a_diverged_model_is_nan(case):
    logit, target, _ = case
    logit[0, 0] = np.nan
    assert np.isnan(accuracy(logit, target))


def test_shapes_that_do_not_fit_are_refused(case):
    logit, target, weight = case
    with pytest.raises(AssertionError):
        losses.cross_entropy(logit[0], target)
    with pytest.raises(AssertionError):
        losses.cross_entropy(logit, target, weight[:-1])
    with pytest.raises(AssertionError):
        losses.kl_to_bayes(logit[:, :-1], logit)


def test_ties_are_hit_by_chance():
    with np.errstate(divide="ignore"):
        logit = np.log([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]])
    logit, target = logit.astype(np.float32), np.array([1, 2, 0])
    found = tied_accuracy(logit, target)
    assert found == pytest.approx((1 / 2 + 1 + 1 / 3) / 3, rel=1e-6)
    weighted = tied_accuracy(logit, target, np.array([0, 1, 0], np.float32))
    assert weighted == 1
    one = np.array([1, 1, 0], np.float32)
    assert tied_accuracy(logit, np.array([2, 0, 0]), one) == 0
    logit[0, 0] = np.nan  # impossible evidence is not a miss
    assert np.isnan(tied_accuracy(logit, target))


AVERAGES = {
    "cross_entropy": cross_entropy,
    "accuracy": accuracy,
    "tied_accuracy": tied_accuracy,
    "predictive_entropy": lambda logit, _, weight: predictive_entropy(logit, weight),
    "kl_to_bayes": lambda logit, _, weight: kl_to_bayes(
        jnp.full(logit.shape, -np.log(logit.shape[1])), logit, weight
    ),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_a_position_without_weight_does_not_count_whatever_it_is(case, name):
    logit, target, weight = case
    run = jax.jit(jax.value_and_grad(AVERAGES[name]))
    found = run(
        np.where(weight[:, None] == 0, np.nan, logit),
        np.where(weight == 0, -1, target),
        weight,
    )
    for one, other in zip(found, run(logit, target, weight), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", AVERAGES)
def test_a_negative_weight_makes_nan(case, name):
    logit, target, weight = case
    for wrong in (-1.0, np.nan):
        spoilt = np.where(np.arange(9) == 2, wrong, weight)
        assert np.isnan(AVERAGES[name](logit, target, spoilt))


@pytest.mark.parametrize("wrong", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_target_that_is_not_a_class_makes_nan(case, wrong):
    logit, target, _ = case
    target = np.where(np.arange(9) == 4, wrong, target)
    loss, gradient = value_and_gradient(logit, target)
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(gradient).all(axis=1), np.arange(9) == 4)
    assert np.isnan(accuracy(logit, target))
    assert np.isnan(tied_accuracy(logit, target))


def test_a_probability_below_zero(case):
    logit, _, _ = case
    target = np.full((9, 5), 0.2)
    target[3] = [1.1, -0.1, 0, 0, 0]
    loss, gradient = value_and_gradient(logit, target)
    assert np.isnan(loss)
    assert np.isnan(gradient[3]).all()
    assert np.isnan(accuracy(logit, target))


def test_no_positions():
    with pytest.raises(ValueError, match="length=0: must be 1 or more positions"):
        cross_entropy(jnp.zeros((0, 3)), jnp.zeros(0, int))
