"""EM-like steps of one head: fix attention, move values, then move the rest."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxattn.algorithms.base import (
    Algorithm,
    GradientFunction,
    Info,
    MixFunction,
    State,
)
from jaxattn.algorithms.gradients import causal_gradient, causal_mix, over_sequences
from jaxattn.algorithms.roles import ROLE_OF, check_roles
from jaxattn.tasks.base import Batch
from jaxattn.theory import laws, losses, m_steps
from jaxattn.theory.attention import Params
from jaxattn.theory.m_steps import Held, MStep

# When the frame's gradient is taken: after the M-step, or at the same point.
ORDERS = ("alternating", "simultaneous")


class EMState(NamedTuple):
    """State that `em` carries beside the parameters."""

    frame: optax.OptState
    memory: Any  # of the M-step


def em(
    m_step: MStep,
    frame: optax.GradientTransformation,
    *,
    order: str = "alternating",
    inner_steps: int = 1,
    frame_roles: Collection[str] = ("query", "key", "output"),
    still: Collection[str] = (),
    shared: Collection[str] = (),
    mix: MixFunction = causal_mix,
    loss_and_gradient: GradientFunction = causal_gradient,
) -> Algorithm:
    """Returns EM-like steps: responsibilities are fixed while the values move.

    E-step: a from W_Q, W_K, and Z = a X.  M-step: W_V under fixed a, `inner_steps`
    times.  Frame step: W_Q, W_K, W_O, b_O by optax, with the gradient taken

      "alternating"   after the M-step: with a fixed, ∂L/∂Z = δ W_Oᵀ W_Vᵀ is pulled back
                      through a, so that a step costs the attention of one gradient;
      "simultaneous"  before it, at the point where the M-step begins too. With
                      `m_steps.gradient` and one inner step this is `two_timescale`.

    Args:
      m_step: from `m_steps`: `gradient`, `prototype`, `majorised`, or your own.
      frame: an optax transformation; its rates may be traced. See `by_role`.
      order: when the frame's gradient is taken.
      inner_steps: how often W_V moves under the same a, at least 1; static.
      frame_roles: what the frame moves.
      still: roles that stay fixed.
      shared: roles that M-step and frame may both move.
      mix: (q, k, v) -> a v of one sequence; default `mix_by_streaming`, causal.
      loss_and_gradient: of one sequence; only for "simultaneous".

    Returns:
      Algorithm. Info.loss is that before the step.

    Raises:
      RoleError: a role that nothing moves, or that both M-step and frame move.
      ValueError: order or inner_steps out of range.

    Source: arXiv 2512.22473, section 4.
    """
    check_roles(
        {"m_step": ("value",), "frame": frame_roles}, still=still, shared=shared
    )
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: must be one of {', '.join(ORDERS)}")
    if inner_steps < 1:
        raise ValueError(f"inner_steps={inner_steps}: must be 1 or more")
    averaged = over_sequences(loss_and_gradient)
    moved_by_frame = {name for name, role in ROLE_OF.items() if role in frame_roles}

    def of_frame(params: Params) -> Params:
        left_out = set(Params._fields) - moved_by_frame
        return params._replace(**dict.fromkeys(left_out))

    def init(params: Params) -> State:
        return State(params, EMState(frame.init(of_frame(params)), m_step.init(params)))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        params, (frame_state, memory) = state
        held, pull_back = fix_attention(params, batch, mix)
        if order == "simultaneous":
            loss, grads = averaged(params, batch, key)
            value_gradient = grads.w_v
        else:
            loss, _, _, value_gradient = m_steps.signals(params, held)
        plan, memory = m_step.begin(memory, params, held)

        def inner(_, carry: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
            moving, value_gradient = carry
            w_v = moving.w_v + m_step.move(plan, moving, value_gradient)
            moving = moving._replace(w_v=w_v)
            return moving, m_steps.signals(moving, held).value_gradient

        moved, _ = jax.lax.fori_loop(0, inner_steps, inner, (params, value_gradient))
        if order == "alternating":
            grads = fixed_gradient(moved, held, pull_back)
        updates, frame_state = frame.update(
            of_frame(grads), frame_state, of_frame(moved)
        )
        updated = optax.apply_updates(of_frame(moved), updates)
        changed = {name: getattr(updated, name) for name in moved_by_frame}
        state = State(moved._replace(**changed), EMState(frame_state, memory))
        return state, Info(loss)

    return Algorithm(init, step)


def fix_attention(
    params: Params, batch: Batch, mix: MixFunction
) -> tuple[Held, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Computes the E-step: attention of each sequence, to be fixed.

    Z = a X,  N = aᵀ 1

    Args:
      params: of the head; only W_Q and W_K are used.
      batch: one sequence, or several with a leading axis.
      mix: (q, k, v) -> a v of one sequence.

    Returns:
      Held, and the pullback through a: ∂L/∂Z (R, d_x) -> (∂L/∂W_Q, ∂L/∂W_K). The moment
      needs its own backward pass, which XLA leaves out if it is not used.
    """
    single = batch.inputs.ndim == 2
    several = jax.tree.map(lambda leaf: leaf[None], batch) if single else batch
    num_sequences, length, d_x = several.inputs.shape
    dtype = several.inputs.dtype

    def mixed(w_q: jax.Array, w_k: jax.Array) -> jax.Array:
        def one(inputs: jax.Array) -> jax.Array:
            return mix(inputs @ w_q, inputs @ w_k, inputs)

        rows = one(batch.inputs) if single else jax.lax.map(one, batch.inputs)
        return rows.reshape(-1, d_x)

    def moment(inputs: jax.Array) -> jax.Array:
        query, key = inputs @ params.w_q, inputs @ params.w_k
        ones = jnp.ones((length, 1), dtype)
        _, columns = jax.vjp(lambda value: mix(query, key, value), ones)
        (usage,) = columns(ones)
        return inputs.T @ (usage * inputs)

    def shares(weights: jax.Array | None) -> jax.Array:
        return losses.position_shares(weights, length, dtype) / num_sequences

    if batch.weights is None:
        share = jnp.tile(shares(None), num_sequences)
    else:
        share = jax.vmap(shares)(several.weights).reshape(-1)
    z, pull_back = jax.vjp(mixed, params.w_q, params.w_k)
    held = Held(
        mixed=z,
        targets=several.targets.reshape(-1),
        share=share,
        moment=jnp.mean(jax.lax.map(moment, several.inputs), axis=0),
    )
    return held, pull_back


def fixed_gradient(
    params: Params,
    held: Held,
    pull_back: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> Params:
    """Computes the gradient of the loss for all parameters, at fixed attention.

    ∂L/∂Z = u W_Vᵀ,  u = δ W_Oᵀ,  ∂L/∂W_O = gᵀ δ,  ∂L/∂b_O = Σ_i δ_i

    Args:
      params: with the W_Q and W_K of the E-step, and any values and read-out.
      held: from `fix_attention`.
      pull_back: from `fix_attention`.

    Returns:
      Params.
    """
    _, context, delta, value_gradient = m_steps.signals(params, held)
    upstream = laws.upstream_gradient(delta, params.w_o)
    bias = None if params.b_o is None else laws.output_bias_gradient(delta)
    return Params(
        *pull_back(upstream @ params.w_v.T), value_gradient, context.T @ delta, bias
    )
