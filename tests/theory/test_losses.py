"""Losses against their definitions in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxattn.theory import losses


@pytest.fixture
def case(x64):
    rng = np.random.default_rng(0)
    logit = jnp.asarray(3 * rng.normal(size=(9, 5)))
    weight = jnp.asarray(np.where(np.arange(9) % 3 == 0, 0, rng.random(9)))
    return logit, jnp.asarray(rng.integers(0, 5, 9)), weight


def test_cross_entropy(case):
    logit, target, weight = case
    nll = -special.log_softmax(logit, axis=1)[np.arange(9), target]
    assert losses.cross_entropy(logit, target) == pytest.approx(nll.mean())
    weighted = np.average(nll, weights=weight)
    assert losses.cross_entropy(logit, target, weight) == pytest.approx(weighted)


def test_scaling_the_weights_changes_nothing(case):
    logit, target, weight = case
    once = losses.cross_entropy(logit, target, weight)
    assert losses.cross_entropy(logit, target, 7 * weight) == pytest.approx(once)


def test_all_weights_zero_is_zero_not_nan(case):
    logit, target, weight = case
    loss, gradient = jax.value_and_grad(losses.cross_entropy)(logit, target, 0 * weight)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)


def test_predictive_entropy(case):
    logit, _, weight = case
    entropy = stats.entropy(special.softmax(logit, axis=1), axis=1)
    assert losses.predictive_entropy(logit) == pytest.approx(entropy.mean())
    weighted = np.average(entropy, weights=weight)
    assert losses.predictive_entropy(logit, weight) == pytest.approx(weighted)


def test_predictive_entropy_of_the_extremes_and_its_gradient(x64):
    assert losses.predictive_entropy(jnp.zeros((2, 8))) == pytest.approx(np.log(8))
    ruled_out = jnp.array([[0.0, -jnp.inf, -jnp.inf]])
    value, gradient = jax.value_and_grad(losses.predictive_entropy)(ruled_out)
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
    assert losses.kl_to_bayes(log_bayes, logit) == pytest.approx(kl.mean())
    weighted = np.average(kl, weights=weight)
    assert losses.kl_to_bayes(log_bayes, logit, weight) == pytest.approx(weighted)
    same = losses.kl_to_bayes(jax.nn.log_softmax(logit), logit)
    assert same == pytest.approx(0, abs=1e-15)


def test_kl_where_bayes_rules_classes_out(x64):
    log_bayes = jnp.array([[0.0, -jnp.inf]])
    logit = jnp.zeros((1, 2))
    value, gradient = jax.value_and_grad(losses.kl_to_bayes, 1)(log_bayes, logit)
    assert value == pytest.approx(np.log(2))
    assert np.isfinite(gradient).all()


def test_kl_does_not_hide_flagged_evidence(x64):
    log_bayes = jnp.full((1, 2), jnp.nan)
    assert np.isnan(losses.kl_to_bayes(log_bayes, jnp.zeros((1, 2))))


def test_accuracy(case):
    logit, target, weight = case
    hit = np.argmax(logit, axis=1) == target
    assert losses.accuracy(logit, target) == pytest.approx(hit.mean())
    weighted = np.average(hit, weights=weight)
    assert losses.accuracy(logit, target, weight) == pytest.approx(weighted)


def test_accuracy_of_a_diverged_model_is_no_number(case):
    logit, target, _ = case
    assert np.isnan(losses.accuracy(logit.at[0, 0].set(jnp.nan), target))


def test_shapes_that_do_not_fit_are_refused(case):
    logit, target, weight = case
    with pytest.raises(AssertionError):
        losses.cross_entropy(logit[0], target)
    with pytest.raises(AssertionError):
        losses.cross_entropy(logit, target, weight[:-1])
    with pytest.raises(AssertionError):
        losses.kl_to_bayes(logit[:, :-1], logit)


def test_ties_are_hit_by_chance():
    logit = jnp.log(
        jnp.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]])
    )
    target = jnp.array([1, 2, 0])
    found = losses.tied_accuracy(logit, target)
    assert found == pytest.approx((1 / 2 + 1 + 1 / 3) / 3, rel=1e-6)
    weighted = losses.tied_accuracy(logit, target, jnp.array([0.0, 1.0, 0.0]))
    assert weighted == 1
    wrong = losses.tied_accuracy(logit, jnp.array([2, 0, 0]), jnp.array([1.0, 1, 0]))
    assert wrong == 0
    lost = logit.at[0, 0].set(jnp.nan)  # impossible evidence is no miss
    assert jnp.isnan(losses.tied_accuracy(lost, target))


AVERAGES = {
    "cross_entropy": losses.cross_entropy,
    "accuracy": losses.accuracy,
    "tied_accuracy": losses.tied_accuracy,
    "predictive_entropy": lambda logit, _, weight: losses.predictive_entropy(
        logit, weight
    ),
    "kl_to_bayes": lambda logit, _, weight: losses.kl_to_bayes(
        jnp.full(logit.shape, -np.log(logit.shape[1])), logit, weight
    ),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_a_position_without_weight_does_not_count_whatever_it_is(case, name):
    logit, target, weight = case
    run = jax.value_and_grad(AVERAGES[name])
    found = run(
        jnp.where(weight[:, None] == 0, jnp.nan, logit),
        jnp.where(weight == 0, -1, target),
        weight,
    )
    for one, other in zip(found, run(logit, target, weight), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", AVERAGES)
def test_a_negative_weight_is_no_weight(case, name):
    logit, target, weight = case
    for wrong in (-1.0, np.nan):
        spoilt = weight.at[2].set(wrong)
        assert np.isnan(AVERAGES[name](logit, target, spoilt))


@pytest.mark.parametrize("wrong", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_target_that_is_no_class(case, wrong):
    logit, target, _ = case
    target = target.at[4].set(wrong)
    loss, gradient = jax.value_and_grad(losses.cross_entropy)(logit, target)
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(gradient).all(axis=1), np.arange(9) == 4)
    assert np.isnan(losses.accuracy(logit, target))
    assert np.isnan(losses.tied_accuracy(logit, target))


def test_a_probability_below_zero(case):
    logit, _, _ = case
    target = jnp.full((9, 5), 0.2).at[3].set(jnp.array([1.1, -0.1, 0, 0, 0]))
    loss, gradient = jax.value_and_grad(losses.cross_entropy)(logit, target)
    assert np.isnan(loss)
    assert np.isnan(gradient[3]).all()
    assert np.isnan(losses.accuracy(logit, target))


def test_no_positions():
    with pytest.raises(ValueError, match="length=0: allowed: 1 or more positions"):
        losses.cross_entropy(jnp.zeros((0, 3)), jnp.zeros(0, int))
