"""Geometry where it was planted, where there is none, and against SciPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxattn.measures import diagnostics, geometry

pytestmark = pytest.mark.usefixtures("x64")
# Of a generator that compiles in half the time of the default one.
KEY = jax.random.key(0, impl="unsafe_rbg")

DRAWS = 100
N, D, CLASSES, KEYS = 120, 6, 4, 6
LENGTH = 6  # of sequences, where rows are
HELD_OUT = jnp.arange(N) % 3 == 1

# Few programs, of few shapes, and random numbers drawn once for several problems:
# compiling is what takes time here.
rank_correlation = jax.jit(geometry.rank_correlation)
axis_of = functools.partial(geometry.entropy_axis, draws=DRAWS, block=1)
keys_of = functools.partial(geometry.key_axes, draws=DRAWS)
entropy_axis = jax.jit(axis_of)
axis_of_sequences = jax.jit(functools.partial(axis_of, block=LENGTH))
entropy_axes = jax.jit(jax.vmap(axis_of, (0, 0, None)))
key_axes = jax.jit(keys_of)
several_key_axes = jax.jit(jax.vmap(keys_of, (0, None)))
read_out = jax.jit(geometry.belief_read_out)
read_outs = jax.jit(
    jax.vmap(functools.partial(read_out, ridge=0.1), (0, 0, None, None))
)


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_same(found, expected, **tolerance):
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, **tolerance)


# --- rank correlation


@pytest.mark.parametrize("levels", [None, 2, 4])
def test_rank_correlation_is_scipys(levels):
    """With ties, in one and in both, and without."""
    for seed in range(10):
        x = rng(seed).normal(size=40)
        y = x + 2 * rng(seed + 100).normal(size=40)
        if levels:
            x = np.round(x * levels / 4)
            y = np.round(y * levels) if seed % 2 else y
        value, valid = rank_correlation(jnp.array(x), jnp.array(y))
        assert valid
        np.testing.assert_allclose(value, stats.spearmanr(x, y).statistic, atol=1e-14)


def test_rank_correlation_of_the_extremes():
    x = np.exp(rng().normal(size=40))
    for y, expected in ((x**3, 1), (-np.log(x), -1)):
        np.testing.assert_allclose(
            rank_correlation(jnp.array(x), jnp.array(y))[0], expected
        )
    y = x.copy()
    x[np.argmax(x)] = np.inf
    np.testing.assert_allclose(rank_correlation(jnp.array(x), jnp.array(y))[0], 1)
    constant = jnp.full(40, 0.1)
    for pair in ((constant, jnp.array(x)), (jnp.array(x), constant)):
        value, valid = rank_correlation(*pair)
        assert not valid
        assert value == 0
    lost = constant.at[2].set(jnp.nan)
    value, valid = rank_correlation(jnp.array(x), lost)
    assert np.isnan(value)
    assert valid


# --- entropy axis


def curve(noise=0.1, seed=0):
    """Points near a bent line, and the entropies that it is ordered by."""
    entropy = rng(seed).uniform(0, 3, N)
    line, bend = np.linalg.qr(rng(seed + 1).normal(size=(D, 2)))[0].T
    points = np.outer(entropy, line) + 0.05 * np.outer(entropy**2, bend) + 7
    return points + noise * rng(seed + 2).normal(size=(N, D)), entropy


def test_a_planted_entropy_axis():
    points, entropy = curve(noise=0.4)
    found = entropy_axis(jnp.array(points), jnp.array(entropy), KEY)
    assert all(answer.valid for answer in found)
    assert found.found.value > 0.9
    assert found.random_direction.value < found.found.value - 0.2
    # E|ρ| of n points in no order.
    expected = math.sqrt(2 / (math.pi * (N - 1)))
    np.testing.assert_allclose(found.permuted.value, expected, rtol=0.25)
    # By hand, from NumPy's own axes and directions.
    centred = points - points.mean(axis=0)
    _, singular, axes = np.linalg.svd(centred)
    rho = stats.spearmanr(centred @ axes[0], entropy).statistic
    np.testing.assert_allclose(found.found.value, abs(rho), atol=1e-12)
    share = singular**2 / (singular**2).sum()
    np.testing.assert_allclose(found.one_axis.value, share[0], atol=1e-12)
    np.testing.assert_allclose(found.two_axes.value, share[:2].sum(), atol=1e-12)
    rhos = [
        abs(stats.spearmanr(centred @ direction, entropy).statistic)
        for direction in rng(5).normal(size=(DRAWS, D))
    ]
    error = np.std(rhos) * math.sqrt(2 / DRAWS)
    np.testing.assert_allclose(
        found.random_direction.value, np.mean(rhos), atol=3 * error
    )


def test_no_entropy_axis_in_a_ball():
    """Over eight balls no more is found than by chance."""
    points = jnp.array(rng().normal(size=(8, N, D)))
    entropy = jnp.array(rng(1).uniform(0, 3, (8, N)))
    found = entropy_axes(points, entropy, KEY)
    chance = math.sqrt(2 / (math.pi * (N - 1)))
    for which in (found.found, found.random_direction, found.permuted):
        np.testing.assert_allclose(which.value.mean(), chance, atol=0.04)
    assert (found.found.value < 4 / math.sqrt(N - 1)).all()
    assert (found.one_axis.value < 0.4).all()


def test_an_entropy_axis_has_no_unit_and_no_sign():
    points, entropy = map(jnp.array, curve(noise=0.5))
    once = entropy_axis(points, entropy, KEY)
    for other in (1e-200 * points, -points, 1e200 * (points - 7)):
        again = entropy_axis(other, 5 * entropy + 1, KEY)
        assert_same(again, once, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_points_are_tied_whatever_rounding_says(dtype):
    """Three beliefs, many times, along a line, and entropies off by a last digit."""
    which = rng().integers(0, 3, N)
    line = np.outer(np.array([0.3, 0.71, 1.9])[which], rng(1).normal(size=D))
    entropy = np.log2(np.array([1.0, 2, 3]))[which]
    for values in (line, entropy):
        values *= 1 + 2 * np.finfo(dtype).eps * rng(2).normal(size=values.shape)
    found = entropy_axis(jnp.array(line, dtype), jnp.array(entropy, dtype), KEY)
    assert found.found.value.dtype == dtype
    np.testing.assert_allclose(found.found.value, 1, rtol=1e-6)
    # On a line any direction is the first axis: the null says so.
    np.testing.assert_allclose(found.random_direction.value, 1, rtol=1e-6)
    np.testing.assert_allclose(found.one_axis.value, 1, rtol=1e-6)


def test_no_entropy_axis_without_differences():
    points, entropy = map(jnp.array, curve())
    nowhere = entropy_axis(jnp.full_like(points, 0.1), entropy, KEY)
    assert not any(answer.valid for answer in nowhere)
    same = entropy_axis(points, jnp.full_like(entropy, 0.1), KEY)
    assert not (same.found.valid | same.random_direction.valid | same.permuted.valid)
    assert same.one_axis.valid
    for leaf in jax.tree.leaves((nowhere, same)):
        assert np.isfinite(leaf).all()
    for lost in (
        entropy_axis(points.at[3, 1].set(jnp.nan), entropy, KEY),
        entropy_axis(points, entropy.at[3].set(jnp.nan), KEY),
    ):
        assert np.isnan(lost.found.value)
        assert lost.found.valid


# --- beliefs


def beliefs_and_features(seed, noise=0.0):
    """Beliefs, and features that hold them along some directions, beside others."""
    beliefs = rng(seed).dirichlet(np.ones(CLASSES), N)
    others = rng(seed + 1).normal(size=(N, D - CLASSES))
    features = np.concatenate([beliefs, others], axis=1)
    features += noise * rng(seed + 3).normal(size=features.shape)
    return beliefs, features @ rng(seed + 2).normal(size=(D, D)) + 3


def fitted_by_hand(features, beliefs, held_out, ridge):
    """Least squares with rows for the ridge: R² on held-out rows."""
    x, y = features[~held_out], beliefs[~held_out]
    middle, mean = x.mean(axis=0), y.mean(axis=0)
    d = x.shape[1]
    penalty = ridge * ((x - middle) ** 2).sum() / d
    rows = np.concatenate([x - middle, math.sqrt(penalty) * np.eye(d)])
    right = np.concatenate([y - mean, np.zeros((d, y.shape[1]))])
    slope = np.linalg.lstsq(rows, right)[0]
    missed = beliefs[held_out] - mean - (features[held_out] - middle) @ slope
    return 1 - (missed**2).sum() / ((beliefs[held_out] - mean) ** 2).sum()


def test_planted_beliefs_are_read_out():
    beliefs, features = beliefs_and_features(0)
    found = read_out(jnp.array(features), jnp.array(beliefs), HELD_OUT, KEY, ridge=1e-8)
    assert found.found.valid
    assert found.permuted.valid
    np.testing.assert_allclose(found.found.value, 1, atol=1e-6)
    assert found.found.value <= 1
    assert -0.5 < found.permuted.value <= 0.1


@pytest.mark.parametrize("ridge", [0.0, 0.01, 0.3])
def test_read_out_by_hand(ridge):
    beliefs, features = beliefs_and_features(0, noise=0.1)
    args = jnp.array(features), jnp.array(beliefs)
    found = read_out(*args, HELD_OUT, KEY, ridge=ridge)
    expected = fitted_by_hand(features, beliefs, np.asarray(HELD_OUT), ridge)
    np.testing.assert_allclose(found.found.value, expected, atol=1e-10)
    assert 0.02 < expected < 0.95


def test_what_is_not_there_is_not_read_out():
    """On average over eight, as far below 0 as useless features cost."""
    beliefs = jnp.array(rng(0).dirichlet(np.ones(CLASSES), (8, N)))
    features = jnp.array(rng(1).normal(size=(8, N, D)))
    found = read_outs(features, beliefs, HELD_OUT, KEY)
    for which in (found.found, found.permuted):
        np.testing.assert_allclose(which.value.mean(), -D / (N * 2 / 3), atol=0.06)
        assert (which.value < 0.1).all()
    stiff = read_out(features[0], beliefs[0], HELD_OUT, KEY, ridge=1e12)
    np.testing.assert_allclose(stiff.found.value, 0, atol=1e-10)


def test_read_out_has_no_unit_and_no_favourite_direction():
    beliefs, features = beliefs_and_features(3, noise=0.1)
    turn = np.linalg.qr(rng(8).normal(size=(D, D)))[0]
    once = read_out(jnp.array(features), jnp.array(beliefs), HELD_OUT, KEY, ridge=0.1)
    for other in (1e6 * features, 1e-200 * features, features @ turn + 5):
        again = read_out(jnp.array(other), jnp.array(beliefs), HELD_OUT, KEY, ridge=0.1)
        assert_same(again, once, atol=1e-9)


def test_more_features_than_rows(x64):
    """At ridge 0 the least-norm map, which is that of a very small ridge too."""
    beliefs, features = map(jnp.array, beliefs_and_features(0, noise=0.1))
    held_out = jnp.arange(N) >= D - 1
    least = read_out(features, beliefs, held_out, KEY, ridge=0.0)
    by_hand = fitted_by_hand(*map(np.asarray, (features, beliefs, held_out)), 0)
    np.testing.assert_allclose(least.found.value, by_hand, rtol=1e-8)


def test_held_out_beliefs_do_not_help_the_fit():
    """Rows that are judged alone decide the score, rows fitted to alone the map."""
    beliefs, features = beliefs_and_features(0)
    lie = np.where(np.asarray(HELD_OUT)[:, None], np.roll(beliefs, 1, axis=1), beliefs)
    found = read_out(jnp.array(features), jnp.array(lie), HELD_OUT, KEY, ridge=1e-8)
    x, y = features, lie
    expected = fitted_by_hand(x, y, np.asarray(HELD_OUT), 1e-8)
    np.testing.assert_allclose(found.found.value, expected, atol=1e-10)
    assert expected < 0


def test_the_null_permutes_only_what_is_fitted_to():
    """One row fitted to, or all alike: nothing to permute, and both are the same."""
    beliefs, features = map(jnp.array, beliefs_and_features(0))
    alike = jnp.where(HELD_OUT[:, None], beliefs, beliefs[:1])
    found = read_out(features, alike, HELD_OUT, KEY, ridge=0.1)
    np.testing.assert_allclose(found.permuted.value, found.found.value, atol=1e-12)
    np.testing.assert_allclose(found.found.value, 0, atol=1e-12)
    assert found.found.valid


def test_read_out_without_an_answer():
    beliefs, features = map(jnp.array, beliefs_and_features(0))
    for held_out, right in (
        (jnp.zeros(120, bool), beliefs),
        (jnp.ones(120, bool), beliefs),
        (HELD_OUT, jnp.full_like(beliefs, 0.1)),
    ):
        found = read_out(features, right, held_out, KEY, ridge=0.1)
        for answer in found:
            assert not answer.valid
            assert answer.value == 0
    blind = read_out(jnp.full_like(features, 0.1), beliefs, HELD_OUT, KEY, ridge=0.0)
    assert blind.found.valid
    assert blind.found.value == 0
    unseen = jnp.where(HELD_OUT[:, None], features, 0.1)  # nothing to be fitted to
    assert read_out(unseen, beliefs, HELD_OUT, KEY, ridge=0.0).found.value == 0
    for lost in (
        read_out(features, beliefs.at[4].set(jnp.nan), HELD_OUT, KEY, ridge=0.1),
        read_out(features.at[4].set(jnp.inf), beliefs, HELD_OUT, KEY, ridge=0.1),
    ):
        assert np.isnan(lost.found.value)
        assert lost.found.valid


# --- keys


def test_keys_of_an_orthonormal_base():
    base = np.linalg.qr(rng().normal(size=(KEYS, D)))[0]
    found = key_axes(jnp.array(base), KEY)
    np.testing.assert_allclose(found.found.value, 0, atol=1e-15)
    # E|cos| in d dimensions is Γ(d/2) / √π Γ((d+1)/2).
    expected = math.gamma(D / 2) / (math.sqrt(math.pi) * math.gamma((D + 1) / 2))
    np.testing.assert_allclose(found.random_keys.value, expected, rtol=0.05)
    assert found.shuffled.value > 0.2


def test_keys_along_one_direction():
    """Of either sign; shuffled, half of the coordinates change theirs."""
    sign = np.array([[1.0], [-1], [1], [-1], [1], [-1]])
    found = key_axes(jnp.array(sign * rng(1).normal(size=D)), KEY)
    np.testing.assert_allclose(found.found.value, 1)
    assert found.shuffled.value < 0.6
    assert found.random_keys.value < 0.4


def test_an_offset_is_not_what_the_shuffled_keys_lose():
    keys = jnp.array(rng().normal(size=(KEYS, D)) + 5)
    found = key_axes(keys, KEY)
    assert found.found.value > 0.9
    np.testing.assert_allclose(found.shuffled.value, found.found.value, atol=0.02)
    assert found.random_keys.value < 0.4


def test_random_keys_are_as_the_nulls():
    keys = jnp.array(rng().normal(size=(8, KEYS, D)))
    found = several_key_axes(keys, KEY)
    mean, *nulls = (answer.value.mean() for answer in found)
    np.testing.assert_allclose(nulls, mean, rtol=0.1)
    by_hand = diagnostics.orthogonality(keys[0]).absolute.value
    np.testing.assert_allclose(found.found.value[0], by_hand, rtol=1e-12)


def test_keys_have_no_unit_and_may_be_too_few():
    keys = jnp.array(rng().normal(size=(KEYS, D)))
    once = key_axes(keys, KEY)
    assert_same(key_axes(1e-30 * keys, KEY), once, rtol=1e-12)
    lengths = jnp.array(rng(1).uniform(0.1, 9, (KEYS, 1)))
    np.testing.assert_allclose(
        key_axes(lengths * keys, KEY).found.value, once.found.value, rtol=1e-12
    )
    assert not key_axes(jnp.zeros((KEYS, D)).at[0].set(1), KEY).found.valid
    lost = key_axes(keys.at[2, 2].set(jnp.nan), KEY)
    assert np.isnan(lost.found.value)
    assert np.isnan(lost.shuffled.value)
    assert lost.found.valid


# --- all of them


def looped(function, *args):
    one_by_one = [function(*(x[i] for x in args)) for i in range(8)]
    return jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)


def test_several_at_once_are_one_by_one():
    """Under vmap and lax.map, where stacks of eigendecompositions once waited."""
    many = [beliefs_and_features(seed, noise=0.1) for seed in range(8)]
    beliefs, features = (jnp.array(np.stack(x)) for x in zip(*many, strict=True))
    entropy = -jnp.sum(beliefs**2, axis=2)

    def axis(features, entropy):
        return entropy_axis(features, entropy, KEY)

    def belief(features, beliefs):
        return read_out(features, beliefs, HELD_OUT, KEY, ridge=0.1)

    one_axis = looped(axis, features, entropy)
    assert_same(entropy_axes(features, entropy, KEY), one_axis, atol=1e-12)
    of_keys = looped(lambda keys: key_axes(keys, KEY), features[:, :KEYS])
    assert_same(several_key_axes(features[:, :KEYS], KEY), of_keys, atol=1e-12)
    of_beliefs = looped(belief, features, beliefs)
    at_once = read_outs(features, beliefs, HELD_OUT, KEY)
    assert_same(at_once, of_beliefs, atol=1e-12)
    mapped = jax.jit(lambda *args: jax.lax.map(lambda x: belief(*x), args))
    assert_same(mapped(features, beliefs), of_beliefs, atol=1e-12)
    for found in (one_axis, of_keys, of_beliefs):
        assert len(set(np.asarray(found.found.value))) == 8


def test_float32_is_near():
    beliefs, features = beliefs_and_features(0)
    points, entropy = curve()
    exact, near = (
        [
            entropy_axis(*arrays[:2], KEY)[3:],
            entropy_axis(*arrays[:2], KEY).found,
            read_out(*arrays[2:], HELD_OUT, KEY, ridge=1e-3).found,
        ]
        for arrays in (
            [jnp.array(x, dtype) for x in (points, entropy, features, beliefs)]
            for dtype in (np.float64, np.float32)
        )
    )
    assert_same(near, exact, atol=1e-4)
    short = jax.ShapeDtypeStruct((KEYS, D), jnp.float32)
    for found in (near, jax.eval_shape(key_axes, short, KEY)):
        kinds = {leaf.dtype.name for leaf in jax.tree.leaves(found)}
        assert kinds == {"float32", "bool"}


def test_what_does_not_fit_is_refused():
    points, entropy = map(jnp.array, curve())
    for wrong in (entropy[1:], points):
        with pytest.raises(AssertionError):
            geometry.rank_correlation(entropy, wrong)
        with pytest.raises(AssertionError):
            geometry.entropy_axis(points, wrong, KEY, draws=2, block=1)
    beliefs, features = map(jnp.array, beliefs_and_features(0))
    for args in (
        (features, beliefs[1:], HELD_OUT),
        (features, beliefs, HELD_OUT[1:]),
        (features, beliefs, HELD_OUT.astype(int)),
        (features[0], beliefs, HELD_OUT),
    ):
        with pytest.raises(AssertionError):
            geometry.belief_read_out(*args, KEY, ridge=0.1)
    with pytest.raises(AssertionError):
        geometry.key_axes(entropy, KEY, draws=2)
    with pytest.raises(ValueError, match=r"^draws=0: must be 1 or more"):
        geometry.entropy_axis(points, entropy, KEY, draws=0, block=1)
    with pytest.raises(ValueError, match=r"^draws=0: must be 1 or more"):
        geometry.key_axes(points, KEY, draws=0)


def test_what_goes_with_position_is_in_the_null_of_whole_sequences():
    """Scores and entropies both fall with position; only one of them with the other."""
    fall = np.tile(np.arange(LENGTH, dtype=float), N // LENGTH)
    own, other = rng(5).normal(size=(2, N))

    def answers(axis, score, entropy):
        points = np.c_[score, 0.01 * rng(6).normal(size=(N, D - 1))]
        found = axis(points, entropy, KEY)
        return float(found.found.value), float(found.permuted.value)

    for score, entropy, above in (
        (fall + 0.1 * other, fall + 0.1 * own, False),  # position, and nothing else
        (fall + own, fall + own, True),
    ):
        found, null = answers(axis_of_sequences, score, entropy)
        assert (found - null > 0.1) == above, (found, null)
        found, chance = answers(entropy_axis, score, entropy)
        assert found - chance > 0.5
    found, null = answers(axis_of_sequences, fall + other, fall)
    assert found == pytest.approx(null, abs=1e-6)


def test_keys_without_direction_stay_so_when_shuffled():
    vectors = rng(6).normal(size=(KEYS, D))
    padded = np.zeros((9, D))
    padded[[0, 2, 3, 6, 7, 8]] = vectors
    one, other = key_axes(vectors, KEY), key_axes(padded, KEY)
    np.testing.assert_allclose(one.found.value, other.found.value, rtol=1e-5)
    assert abs(one.shuffled.value - other.shuffled.value) < 0.02


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_rounding_is_no_geometry(dtype):
    """Points, features or beliefs that are all alike but for their last bits."""
    eps = float(jnp.finfo(dtype).eps)
    last_bits = 1 + eps * rng(0).integers(-1, 2, (N, D))
    points = jnp.asarray(rng(1).normal(size=(N, D)), dtype)
    entropy = jnp.asarray(rng(2).random(N), dtype)
    beliefs = jnp.asarray(rng(3).dirichlet(np.ones(D), N), dtype)
    same = jnp.asarray(rng(1).normal(size=D) * last_bits, dtype)
    far = jnp.asarray(same, dtype) + jnp.asarray(1e4, dtype)
    for alike in (same, far):
        found = entropy_axis(alike, entropy, KEY)
        assert not any(answer.valid for answer in found)
        assert not rank_correlation(alike[:, 0], entropy).valid
        blind = read_out(alike, beliefs, HELD_OUT, KEY, ridge=0.0)
        assert (blind.found.value, blind.permuted.value) == (0, 0)
    assert not rank_correlation(entropy, 1 + 0 * entropy).valid
    constant = jnp.asarray(last_bits / D, dtype)
    told = read_out(points, constant, HELD_OUT, KEY, ridge=0.1)
    assert not any(answer.valid for answer in told)
    assert not any(entropy_axis(points, constant[:, 0], KEY).found)
    line = points[:, :1] * jnp.arange(1, D + 1, dtype=dtype)[None]
    found = entropy_axis(line + jnp.asarray(1e4, dtype), entropy, KEY)
    assert 0.999 < found.one_axis.value <= found.two_axes.value <= 1
    np.testing.assert_allclose(
        rank_correlation(jnp.asarray([1.0, 2.0, jnp.inf], dtype), entropy[:3]).value,
        stats.spearmanr([1, 2, 3], entropy[:3]).statistic,
        atol=1e-6,
    )
