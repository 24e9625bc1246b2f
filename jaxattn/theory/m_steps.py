"""M-steps of EM: W_V moves under fixed attention, without any T x T work.

With fixed responsibilities a, Z = a X stands for them: g = Z W_V. Each M-step is the
gradient dL/dW_V through a linear map of its own, so that one step costs O(T d C), and
several cost no more attention than one. Rates, ridge and damping may be traced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.theory import attention, laws, losses
from jaxattn.theory.attention import Params


class Held(NamedTuple):
    """Sequences under fixed attention; the rows of all of them, one after another."""

    mixed: jax.Array  # Z = a X (R, d_x)
    targets: jax.Array  # (R,), class indices
    share: jax.Array  # (R,), of each row in the loss
    moment: jax.Array  # X^T diag(N) X (d_x, d_x), N_j = sum_i a_ij; sequences averaged


class Signals(NamedTuple):
    """The loss under fixed attention, and its gradients."""

    loss: jax.Array  # nats
    context: jax.Array  # g (R, d_v)
    logit_gradient: jax.Array  # delta (R, C)
    value_gradient: jax.Array  # dL/dW_V (d_x, d_v)


class MStep(NamedTuple):
    """A pure rule for W_V, whose learning rates may be traced.

    init(params) -> memory;  begin(memory, params, held) -> (plan, memory), once for
    each E-step;  move(plan, params, value_gradient) -> the change of W_V.
    """

    init: Callable[[Params], Any]
    begin: Callable[[Any, Params, Held], tuple[Any, Any]]
    move: Callable[[Any, Params, jax.Array], jax.Array]


class Surrogate(NamedTuple):
    """Quadratic bounds on the loss as a function of W_V W_O and b_O, averaged.

    1/2 tr(V' A V B) - tr(H' V) + ..., V = W_V W_O, so they stay valid when W_O changes.
    """

    curvature: jax.Array  # A = Z^T diag(share) Z (d_x, d_x)
    pull: jax.Array  # H = A V B + z b_O^T B - Z^T delta (d_x, C), where it touches
    mean: jax.Array  # z = Z^T share (d_x,)
    count: jax.Array  # steps averaged so far


def signals(params: Params, held: Held) -> Signals:
    """Loss under fixed attention, and its gradients.

    g = Z W_V,  δ_i = share_i (p_i - onehot(y_i)),  ∂L/∂W_V = Zᵀ δ W_Oᵀ

    Args:
      params: of the head; W_Q and W_K are not read.
      held: the sequences.

    Returns:
      Signals.

    Source: arXiv 2512.22473, ∂L/∂v_j = Σ_i a_ij u_i, summed over sources on the inputs.
    """
    chex.assert_rank([held.mixed, held.targets, held.share], [2, 1, 1])
    context = held.mixed @ params.w_v
    logit = attention.read_out(params, context)
    delta = losses.weighted_surprise(logit, held.targets, held.share)
    nll = losses.negative_log_likelihood(logit, held.targets)
    loss = losses.weighted_mean(nll, held.share)
    upstream = laws.upstream_gradient(delta, params.w_o)
    return Signals(loss, context, delta, held.mixed.T @ upstream)


def gradient(rate: jax.typing.ArrayLike) -> MStep:
    """Gradient descent on the values.

    W_V ← W_V - η ∂L/∂W_V

    Args:
      rate: η.

    Returns:
      MStep.
    """
    return MStep(
        init=lambda params: (),
        begin=lambda memory, params, held: ((), memory),
        move=lambda plan, params, value_gradient: -rate * value_gradient,
    )


def prototype(rate: jax.typing.ArrayLike, ridge: jax.typing.ArrayLike) -> MStep:
    """Moves each value by its mean signal, in the least-squares sense for W_V.

    dv_j = -η ū_j,  ū_j = Σ_i a_ij u_i / N_j,  N_j = Σ_i a_ij

    dW_V = argmin_D Σ_j N_j |x_j D - dv_j|² + λ |D|²
         = -η (Xᵀ N X + λ I)⁻¹ ∂L/∂W_V

    The least-norm solution where λ = 0 leaves a choice. u_i contains its position's
    share of the loss, 1/T, so that η = T moves a value by the mean of its queries'
    unweighted signals.

    Args:
      rate: η.
      ridge: λ, at least 0.

    Returns:
      MStep.

    Raises:
      ValueError: the ridge is known while tracing, and below 0.

    Source: arXiv 2512.22473, section 4 (values as prototypes).
    """
    _check_known("ridge", ridge, lambda known: known >= 0, "0 or more")

    def begin(memory: Any, _: Params, held: Held) -> tuple[Any, Any]:
        return eigh(held.moment), memory

    def move(plan: Any, _: Params, value_gradient: jax.Array) -> jax.Array:
        size, basis = plan
        size = jnp.maximum(size, 0)[:, None]
        turned = jnp.where(_above_rounding(size), basis.T @ value_gradient, 0)
        return -rate * (basis @ _divided(turned, size + ridge))

    return MStep(lambda params: (), begin, move)


def majorised(
    ridge: jax.typing.ArrayLike,
    damping: jax.typing.ArrayLike = 1.0,
    statistics_rate: jax.typing.ArrayLike = 1.0,
) -> MStep:
    """Moves to the minimum of a quadratic bound on the loss, in closed form.

    The Hessian of cross-entropy in a position's logits is at most B = (I - 11ᵀ/C)/2, so

    L(W_V + D) + λ/2 |W_V + D|² ≤ L + <G, D> + <D, A D M + λ D>/2 + ...,
    A = Zᵀ diag(share) Z,  M = W_O B W_Oᵀ,  G = ∂L/∂W_V + λ W_V

    and D solves A D M + λ D = -G by two eigendecompositions (least norm where λ = 0
    leaves a choice). A step of ρ D lowers the penalised loss under fixed attention by
    ρ (1 - ρ/2) <G, -D> at least: the loss never rises, and stays only where G is 0.

    With statistics_rate γ < 1 the bound is that of an average over steps, since the
    bound of a single sequence would over-fit: statistics of W_V W_O and b_O are
    averaged, s ← (1 - γ_t) s + γ_t s_t with γ_t = max(γ, 1/t). Then no theorem bounds a
    step.

    Args:
      ridge: λ, at least 0.
      damping: ρ, length of the step relative to D, in (0, 1]; the theorem covers it.
      statistics_rate: γ, in (0, 1]; 1 forgets all earlier steps.

    Returns:
      MStep.

    Raises:
      ValueError: a number is known while tracing, and out of its bounds.

    Source: Böhning 1992 (the bound); Cappé and Moulines 2009, Mairal 2013 (averaging).
    """
    _check_known("ridge", ridge, lambda known: known >= 0, "0 or more")
    for name, share in (("damping", damping), ("statistics_rate", statistics_rate)):
        _check_known(
            name, share, lambda known: 0 < known <= 1, "a number above 0, at most 1"
        )

    def init(params: Params) -> Surrogate:
        (d_x, _), (_, num_classes) = params.w_v.shape, params.w_o.shape
        dtype = params.w_v.dtype
        return Surrogate(
            jnp.zeros((d_x, d_x), dtype),
            jnp.zeros((d_x, num_classes), dtype),
            jnp.zeros((d_x,), dtype),
            jnp.zeros((), dtype),
        )

    def begin(memory: Surrogate, params: Params, held: Held) -> tuple[Any, Surrogate]:
        now = _surrogate(params, held)
        count = memory.count + 1
        new = jnp.maximum(jnp.asarray(statistics_rate, count.dtype), 1 / count)
        averaged = jax.tree.map(lambda m, n: (1 - new) * m + new * n, memory, now)
        averaged = averaged._replace(count=count)
        bounds = (
            eigh(averaged.curvature),
            eigh(params.w_o @ _bound(params.w_o.T)),
        )
        return (memory, new, bounds), averaged

    def move(plan: Any, params: Params, value_gradient: jax.Array) -> jax.Array:
        memory, new, ((size, basis), (out_size, out_basis)) = plan
        old_gradient = _surrogate_gradient(memory, params)
        total = (1 - new) * old_gradient + new * value_gradient
        curvature = jnp.maximum(size, 0)[:, None] * jnp.maximum(out_size, 0)[None]

        def turn(array: jax.Array) -> jax.Array:
            return basis.T @ array @ out_basis

        turned = jnp.where(_above_rounding(curvature), turn(total), 0)
        turned += ridge * turn(params.w_v)
        step = _divided(turned, curvature + ridge)
        return -damping * (basis @ step @ out_basis.T)

    return MStep(init, begin, move)


def penalised_loss(
    params: Params, held: Held, ridge: jax.typing.ArrayLike
) -> jax.Array:
    """L + λ/2 |W_V|² under fixed attention, nats, which `majorised` never raises."""
    return signals(params, held).loss + ridge / 2 * jnp.sum(params.w_v**2)


def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues (n,), rising, and eigenvectors of a symmetric matrix (n, n).

    On CPU `vmap` becomes a loop: jaxlib hands a stack of matrices to the threads that
    run the program and waits there, so that as many stacks at once as there are threads
    wait for each other forever (observed with jaxlib 0.10.2 and two threads).
    """

    def decompose(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(jnp.linalg.eigh(matrix))

    if jax.default_backend() == "cpu":
        decompose = jax.custom_batching.sequential_vmap(decompose)
    return decompose(matrix)


def _check_known(
    name: str, value: Any, fits: Callable[[float], bool], must: str
) -> None:
    """Raises ValueError for a number that does not fit, unless it is traced."""
    if not isinstance(value, jax.core.Tracer) and not all(map(fits, np.ravel(value))):
        raise ValueError(f"{name}={value!r}: must be {must}")


def _bound(array: jax.Array) -> jax.Array:
    """B along the first axis, the classes: half the deviation from the mean."""
    return (array - jnp.mean(array, axis=0, keepdims=True)) / 2


def _surrogate(params: Params, held: Held) -> Surrogate:
    """The bound on the loss of these sequences that touches it at `params`."""
    weighted = held.share[:, None] * held.mixed
    curvature, mean = held.mixed.T @ weighted, jnp.sum(weighted, axis=0)
    delta = signals(params, held).logit_gradient
    pull = _curved(curvature, mean, params) - held.mixed.T @ delta
    return Surrogate(curvature, pull, mean, jnp.zeros((), mean.dtype))


def _curved(curvature: jax.Array, mean: jax.Array, params: Params) -> jax.Array:
    """A V B + z b_Oᵀ B (d_x, C)."""
    logit = curvature @ (params.w_v @ params.w_o)
    if params.b_o is not None:
        logit += mean[:, None] * params.b_o[None]
    return _bound(logit.T).T


def _surrogate_gradient(surrogate: Surrogate, params: Params) -> jax.Array:
    """Gradient of the bound for W_V (d_x, d_v)."""
    curved = _curved(surrogate.curvature, surrogate.mean, params)
    return (curved - surrogate.pull) @ params.w_o.T


def _above_rounding(curvature: jax.Array) -> jax.Array:
    """Where the loss has curvature; elsewhere its gradient is 0 but for rounding."""
    rounding = 4 * max(curvature.shape) * jnp.finfo(curvature.dtype).eps
    return curvature > rounding * jnp.max(curvature)


def _divided(array: jax.Array, by: jax.Array) -> jax.Array:
    """The quotient, and 0 where `by` is 0."""
    return jnp.where(by > 0, array / jnp.where(by > 0, by, 1), 0)
